"""Equal prompts that are answered at the same time are computed once up to their last token, also behind the last whole block.

vLLM shares whole blocks of KV alone, and on CPUs those have 32 tokens at least: of 8 prompts of 44 tokens in a group it computes 12 tokens
each, for nothing. Here a prompt gets the block in which it ends as a copy of another request's, layer by layer, behind the moment at which
the layer has written that one's keys and values. To vLLM this is a KV connector, its interface for KV that comes from elsewhere.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GATHER_S, GATHER_MOST_S = 0.005, 0.05
"""How long requests wait for the next one while nothing runs, and how long in all."""
NOTHING = (0, False)
"""What a connector says that has no tokens for a request."""
LATER = (None, False)
"""What it says of a request that it wants to be asked about again."""


def share_tails(config: "VllmConfig") -> None:
    """Has the engine of a configuration share the ends of prompts, unless the user has a connector of his own or the configuration is one
    for which this is not made: without kept prefixes, with drafts, with steps in flight at the same time or a limit that cuts prompts."""
    settings = config.scheduler_config
    if (
        config.kv_transfer_config is None
        and config.cache_config.enable_prefix_caching
        and config.speculative_config is None
        and config.max_concurrent_batches == 1
        and settings.long_prefill_token_threshold == 0
        and not config.model_config.is_encoder_decoder
    ):
        connector = {"kv_connector": SharedTails.__name__, "kv_connector_module_path": __name__, "kv_role": "kv_consumer"}
        config.kv_transfer_config = KVTransferConfig(**connector)


@dataclass
class Copies(KVConnectorMetadata):
    """Blocks that are copied in a step, one by one: numbers of those that are read and of those that are written."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class SharedTails(KVConnectorBase_V1, SupportsHMA):
    """Scheduler and worker have one each, and tell each other `Copies` once a step. Does nothing for models whose KV is not of one kind.

    Why a copy is right. The block in which a prompt ends is that of a request with the same prompt. That one is running, so its block is
    its own until this step is over, and its prompt is computed, or will be in this step from the first to the last token: a prompt is cut
    only where a step has no room for anybody behind it. The last token is computed by each, which gives its logits, and its keys and values
    are then those of the copy. What a copied block holds behind the prompt is written before it is read.

    Requests that meet an idle engine wait until GATHER_S have passed without another one: a first step with the first of them alone, which
    the others would have to wait for, is as long as one with all.
    """

    def __init__(self, vllm_config: "VllmConfig", role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self.block = vllm_config.cache_config.block_size
        kind = groups[0].kv_cache_spec if len(groups) == 1 else None
        self.able = type(kind) is FullAttentionSpec and kind.block_size == self.block and not kind.non_causal
        self.running: dict[Any, dict[str, Request]] = {}
        """Requests by what they share, in the order of their coming."""
        self.computed_now: set[str] = set()
        """Requests whose prompts are computed in this step."""
        self.leader: Request | None = None
        """Whose tail the request would get that was asked about last."""
        self.copies = Copies()
        self.busy = False
        """Whether the newest step computed anything."""
        self.begun = self.newest = 0.0
        """When the first and the newest request came that meet an idle engine, by the monotonic clock; 0: none has."""
        self.caches: dict[str, Tensor] = {}

    # The scheduler's -----------------------------------------------------------------------------------------------------

    def shared(self, request: Request) -> Any:
        """What requests with the same tail have in common: the blocks before it, by their hash, and its tokens. None without a tail."""
        ids, before = request.prompt_token_ids, (request.num_prompt_tokens - 1) // self.block
        plain = ids is not None and request.prompt_embeds is None and not request.has_encoder_inputs and not request.resumable
        if not (self.able and plain and (request.num_prompt_tokens - 1) % self.block and len(request.block_hashes) >= before):
            return None
        adapter = request.lora_request.lora_name if request.lora_request else None
        return before and request.block_hashes[before - 1], tuple(ids[before * self.block :]), adapter, request.cache_salt

    def on_new_request(self, request: Request) -> None:
        self.newest = time.monotonic()
        self.begun = self.begun or self.newest

    def gathers(self) -> bool:
        """Whether requests wait for others."""
        now = time.monotonic()
        return not self.busy and now - self.newest < GATHER_S and now - self.begun < GATHER_MOST_S

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.gathers():
            return LATER
        tail = (request.num_prompt_tokens - 1) % self.block
        if request.status != RequestStatus.WAITING or num_computed_tokens + tail != request.num_prompt_tokens - 1:
            return NOTHING
        candidates = self.running.get(self.shared(request), {}).values()
        self.leader = next((other for other in candidates if self.has_tail(other)), None)
        return (tail, False) if self.leader else NOTHING

    def has_tail(self, request: Request) -> bool:
        """Whether a request's prompt is computed before any other prompt of this step is read."""
        if request.status != RequestStatus.RUNNING:
            return False
        return request.request_id in self.computed_now or request.num_computed_tokens >= request.num_prompt_tokens - 1

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            assert self.leader and self._kv_cache_manager
            place = (request.num_prompt_tokens - 1) // self.block
            self.copies.sources.append(self._kv_cache_manager.get_block_ids(self.leader.request_id)[0][place])
            self.copies.targets.append(blocks.get_block_ids()[0][place])
        else:
            self.computed_now.add(request.request_id)
        if (shared := self.shared(request)) is not None:
            self.running.setdefault(shared, {})[request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        copies, self.copies = self.copies, Copies()
        self.computed_now.clear()
        self.busy = scheduler_output.total_num_scheduled_tokens > 0
        if self.busy:
            self.begun = 0.0
        return copies

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        holders = self.running.get(shared := self.shared(request), {})
        holders.pop(request.request_id, None)
        if not holders:
            self.running.pop(shared, None)
        return False, None

    # The worker's --------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.caches = kv_caches

    def has_connector_metadata(self) -> bool:
        """Whether anything is copied in this step: else the layers need not ask."""
        return isinstance(self._connector_metadata, Copies) and bool(self._connector_metadata.targets)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        self.sources, self.targets = torch.tensor(copies.sources), torch.tensor(copies.targets)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Comes when a layer has written its keys and values, and before it reads any."""
        cache = self.caches[layer_name]
        cache[self.targets] = cache[self.sources]

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
