"""Hidden states of whole prompts from vLLM, prefix caching on: `vllm_hidden_states.py MODEL`."""

import sys
from pathlib import Path

from safetensors.torch import load_file
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        enforce_eager=True,  # for a quick start; compiled models are served too
        worker_cls="slotmirror.adapters.vllm.Worker",
        additional_config={"slotmirror": {"sink": "files", "folder": "rows"}},
    )
    manual = "Answer in one sentence, from the manual of the pump that follows. " * 20
    prompts = [manual + question for question in ("What is it?", "How loud is it?", "Who made it?")]
    for prompt in prompts:  # from the second on, most of the prompt is a prefix hit
        llm.generate(prompt, SamplingParams(max_tokens=4))
    llm.collective_rpc("slotmirror_flush")
    for path in sorted(Path("rows").glob("*.safetensors")):
        print(path.name, *load_file(path)["hidden_states"].shape)
