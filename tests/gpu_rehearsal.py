"""Would vLLM's build for GPUs serve with this torch? Runs where there is neither a card nor a
driver, by `python scripts/gpu_stack.py rehearse SITE`; the gate leaves it out.

Torch and vLLM are told of an H200, and a library with the names of the driver's functions takes the
driver's place, so libraries load and modules import, but nothing can be computed.
"""

import ast
import ctypes
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu_stack
import pytest
import torch

SITE = Path(os.environ.get(gpu_stack.SITE, ""))
SOURCE = Path(__file__).resolve().parents[1] / "src"
MODULES = """vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.worker.gpu_worker
    vllm.v1.worker.gpu_model_runner vllm.v1.worker.gpu.model_runner
    vllm.v1.worker.gpu.sample.sampler vllm.v1.sample.sampler vllm.v1.attention.backends.flash_attn
    vllm.v1.attention.backends.triton_attn vllm.model_executor.models.llama
    vllm.model_executor.models.qwen3 vllm.model_executor.models.qwen3_moe
    vllm.model_executor.layers.fused_moe.modular_kernel vllm.compilation.backends
    vllm.compilation.cuda_graph vllm.device_allocator.cumem vllm.lora.worker_manager
    vllm.entrypoints.openai.api_server vllm._custom_ops"""
"""What a server on a GPU imports; these modules import the others."""
THEIRS = MODULES.split()
ROOMS = ("inference", "trainer", "orchestrator", "envs/classic", "launch")
PATHS = [path for room in ROOMS for path in sorted(SOURCE.glob(f"rl/{room}/**/*.py"))]
OURS = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in PATHS]
WORKER = "vllm.v1.worker.gpu_worker.Worker"
"""The class that WeightLoader is mixed into."""
USED = {
    "vllm.config.VllmConfig": "model_config cache_config parallel_config device_config "
    "scheduler_config lora_config speculative_config",
    "vllm.config.ModelConfig": "model hf_text_config dtype quantization is_moe max_model_len "
    "return_sampling_mask get_vocab_size",
    "vllm.config.ParallelConfig": "data_parallel_size data_parallel_size_local local_world_size "
    "tensor_parallel_size enable_expert_parallel distributed_executor_backend",
    "vllm.v1.engine.core_client.AsyncMPClient": "_call_utility_async core_engines outputs_queue "
    "get_output_async pause_scheduler_async encoder",
    "vllm.v1.engine.core.EngineCore": "collective_rpc",
    "vllm.v1.engine.output_processor.OutputProcessor": "add_request request_states",
    "vllm.v1.engine.output_processor.RequestState": "queue detokenizer lora_request",
    "vllm.v1.engine.output_processor.RequestOutputCollector": "get",
    "vllm.v1.engine.detokenizer.IncrementalDetokenizer": "num_output_tokens",
    "vllm.v1.engine.EngineCoreOutputs": "outputs",
    "vllm.v1.engine.EngineCoreOutput": "request_id new_token_ids new_sampling_mask",
    "vllm.v1.engine.EngineCoreRequest": "prompt_token_ids sampling_params lora_request",
    "vllm.v1.outputs.SamplingMaskLists": "token_ids offsets",
    "vllm.outputs.CompletionOutput": "token_ids logprobs finish_reason routed_experts "
    "sampling_mask",
    "vllm.outputs.RequestOutput": "finished num_cached_tokens prompt_token_ids prompt_logprobs",
    "vllm.renderers.base.BaseRenderer": "clear_mm_cache_async tokenizer",
    "vllm.lora.request.LoRARequest": "lora_int_id",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "get_model reload_weights",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "get_model reload_weights sampler",
    "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase": "process_weights_"
    "after_loading",
}
"""What our code takes from objects that vLLM hands it, by their classes."""
EXPERTS = {
    **{"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 64, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2},
    **{"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
}
SETTINGS = {
    "merged": [],
    "adapters": ["--trainer.lora.rank=8", "--inference.adapters=hot"],
    "kept ids": ["--orchestrator.sampling.top_p=0.9"],
    "routes": ["--trainer.router_replay=engine"],
}
"""Runs whose server vLLM is asked to configure, by what they use of it."""
VERSIONS = re.compile("hasattr|is_torch_equal|ImportError|AttributeError|Exception")
"""Conditions and clauses that stand for another version of a package."""
NEVER_RUN = re.compile(
    # with VLLM_DISTRIBUTED_USE_SPLIT_GROUP; in a patch of torch 2.9; for Mamba; on other devices
    r"split_group|maybe_log_cudagraph_partition|tl\.math\.log1p|tl\.(extra\.intel|cat)"
    # set while something is compiled; a module and a function of one name
    r"|virtualized\.V\.|_TLS\.|inductor\.standalone_compile"
)
"""What vLLM uses of torch and triton that is not there, and does not matter."""


@pytest.fixture(scope="session", autouse=True)
def card(tmp_path_factory):
    """Makes torch and vLLM answer questions about a card as with an H200."""
    folder = tmp_path_factory.mktemp("driver")
    data = b"".join((SITE / library).read_bytes() for library in gpu_stack.LIBRARIES)
    names = {name.decode() for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", data)}
    source, stub = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names)))
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{stub.name}"]
    subprocess.run(["gcc", *flags, "-o", str(stub), str(source)], check=True)
    ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL)
    os.environ["LD_LIBRARY_PATH"] = str(folder)  # for vLLM's child that looks at a model's class
    answers = SimpleNamespace(
        **{"major": 9, "minor": 0, "name": "NVIDIA H200", "total_memory": 141 << 30},
        **{"multi_processor_count": 132, "warp_size": 32, "L2_cache_size": 60 << 20},
        **{"shared_memory_per_block_optin": 232448, "regs_per_multiprocessor": 65536},
        **{"max_threads_per_multi_processor": 2048, "is_integrated": False},
    )
    torch.cuda.get_device_properties = lambda *_: answers
    torch.cuda.get_device_capability = lambda *_: (answers.major, answers.minor)
    torch.cuda.get_device_name = lambda *_: answers.name
    torch.cuda.device_count, torch.cuda.is_available = lambda: 1, lambda: True
    torch.cuda.current_device = lambda: 0
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    vllm.platforms._current_platform = NonNvmlCudaPlatform()


@pytest.mark.parametrize("library", gpu_stack.LIBRARIES)
def test_library_loads(library):
    ctypes.CDLL(str(SITE / library))


def test_kernels_are_registered():
    names = [schema.name.partition("::") for schema in torch._C._jit_get_all_schemas()]
    counts = {room: sum(name[0] == room for name in names) for room in ("_C", "_moe_C")}
    assert counts["_C"] > 50 and counts["_moe_C"] > 5, counts


@pytest.mark.parametrize("module", THEIRS + OURS)
def test_module_is_imported(module):
    importlib.import_module(module)


@pytest.mark.parametrize("path", USED)
def test_class_has(path):
    assert not {*USED[path].split()} - known(pkgutil.resolve_name(path))


@pytest.mark.parametrize("module", [name for name in OURS if name.startswith("rl.inference.")])
def test_names_and_arguments_are_those_of_vllm_and_torch(module):
    module = importlib.import_module(module)
    assert not faults_of(module, ("torch.", "vllm."))
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            assert not faults_of_class(kind)


def test_vllms_own_names_and_arguments_are_those_of_torch_and_triton():
    for name in THEIRS:
        importlib.import_module(name)
    names = sorted(name for name in sys.modules if name.startswith("vllm."))
    modules = [module for name in names if is_readable(module := sys.modules[name])]
    prefixes = ("torch.", "triton.", "vllm.triton_utils.t")
    assert len(modules) > 500
    faults = [fault for module in modules for fault in faults_of(module, prefixes)]
    assert not [fault for fault in faults if not NEVER_RUN.search(fault)]


@pytest.mark.parametrize("name", SETTINGS)
def test_vllm_configures_a_server(name, tmp_path, monkeypatch):
    from vllm.usage.usage_lib import UsageContext

    from rl.config.command_line import build, parse_args
    from rl.inference.server import engine_config, vllm_arguments
    from rl.models.tiny import make_tiny_model

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    model = make_tiny_model(tmp_path / "model", EXPERTS if name == "routes" else None)
    words = [f"@{SOURCE.parent}/configs/quickstart.toml", f"--model.name={model}"]
    config = build(parse_args([*words, *SETTINGS[name]]))
    settings = engine_config(
        vllm_arguments(config, str(model), False), UsageContext.OPENAI_API_SERVER
    )
    assert settings.device_config.device_type == "cuda"
    print(settings.compilation_config.cudagraph_mode, settings.use_v2_model_runner)


# Reading code -------------------------------------------------------------------------------------


def is_readable(module):
    return (getattr(module, "__file__", None) or "").endswith(".py")


def known(kind):
    """The names of a class and of its objects."""
    names = {*dir(kind)}
    for base in kind.__mro__[:-1]:
        names |= vars(base).get("__annotations__", {}).keys()
        if base.__module__.startswith("vllm"):
            names |= {*re.findall(r"self\.(\w+)", inspect.getsource(base))}
    return names


def faults_of(module, prefixes):
    """What a module uses of packages that is not there, or that takes other arguments."""
    tree, bound, optional = ast.parse(Path(module.__file__).read_text()), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                head = alias.name.partition(".")[0]
                bound[alias.asname or head] = package + (alias.name if alias.asname else head)
        elif isinstance(node, ast.If | ast.IfExp | ast.Try):
            tests = [*getattr(node, "handlers", ())] or [getattr(node, "test", ast.Pass())]
            if any(VERSIONS.search(ast.unparse(test).partition("\n")[0]) for test in tests):
                optional |= {*ast.walk(node)}

    def path_of(node):
        if isinstance(node, ast.Attribute):
            return f"{path_of(node.value)}.{node.attr}"
        return bound.get(node.id, "") if isinstance(node, ast.Name) else ""

    faults = set()
    for node in {*ast.walk(tree)} - optional:
        path = path_of(node.func if isinstance(node, ast.Call) else node)
        if not path.startswith(prefixes) or path.startswith("torch.ops"):
            continue
        try:
            target = pkgutil.resolve_name(path)
            if isinstance(node, ast.Call):
                bind(target, node)
        except (ImportError, AttributeError, TypeError) as error:
            faults.add(f"{module.__name__}:{node.lineno} {path}: {error}")
    return sorted(faults)


def faults_of_class(kind):
    """What a class of ours takes from itself, or from those of vLLM that it inherits from, that is
    not there, or that takes other arguments."""
    bases = (kind, pkgutil.resolve_name(WORKER)) if kind.__name__ == "WeightLoader" else (kind,)
    whole = type(kind.__name__, bases, {}) if len(bases) > 1 else kind
    tree = ast.parse(inspect.getsource(kind))
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    ours = [node for node in attributes if ast.unparse(node.value) in ("self", "super()")]
    stored = {node.attr for node in ours if isinstance(node.ctx, ast.Store)}
    faults = {node.attr for node in ours} - known(whole) - stored
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.func in ours:
            is_own = ast.unparse(node.func.value) == "self"
            target = getattr(whole if is_own else super(kind, whole), node.func.attr, None)
            if inspect.isfunction(target):
                static = inspect.getattr_static(whole, node.func.attr)
                try:
                    bind(target, node, extra=not isinstance(static, staticmethod))
                except TypeError as error:
                    faults.add(f"{node.func.attr}: {error}")
    return faults


def bind(target, call, extra=0):
    """Raises TypeError unless a call's arguments, and `extra` before them, can be passed."""
    try:
        signature = inspect.signature(target)
    except ValueError:  # it is not written in Python
        return
    plain = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    is_whole = len(plain) == len(call.args) and len(named) == len(call.keywords)
    bound = signature.bind if is_whole else signature.bind_partial
    bound(*[None] * (len(plain) + extra), **named)
