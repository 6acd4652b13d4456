"""Stage `language`: a language model of 1.5B with random weights, as `math_1_5b_grpo` trains, and Countdown's modes.

generate    tokens per second of uneven answers, beside transformers' `generate`
learn       tokens per second of an update's forward and backward pass, and its utilisation
modes       every mode of `countdown_grpo`, measured beside predicted
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.generation import MODEL, Arguments, compare
from benchmarks.gpu_stages.work import Figures, Work
from embodied.commands.compare import compare_command
from embodied.config.files import load_config
from embodied_bench.machine import measure_machine, peak_memory, repeat
from embodied_language.model import CausalModel, read_config
from embodied_language.policy import LanguageOptions, LanguagePolicy
from embodied_language.prompts import Prompts
from policies.contract import Inputs, PolicySpec
from policies.random_weights import RANDOM_WEIGHTS

QWEN_1_5B: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""Qwen2.5-1.5B's config.json."""
GENERATED = Arguments(answers=512, rows=256, prompt=64, mean=16, rounds=1)
GENERATED_TINY = Arguments(answers=32, rows=8, mean=4, rounds=1)
ROWS, LENGTH, SECONDS = 4, 2048, 3.0
ROWS_TINY, LENGTH_TINY, SECONDS_TINY = 2, 32, 0.05


def language(work: Work) -> Figures:
    """The variant's figures."""
    return {"generate": generate, "learn": learn, "modes": modes}[work.variant](work)


def write_model(work: Work) -> Path:
    """A directory of the model, without weights, with Countdown's tokenizer."""
    folder = work.scratch / "language"
    shutil.copytree(MODEL, folder)
    sizes = {"max_position_embeddings": 1024} if work.tiny else QWEN_1_5B
    (folder / "config.json").write_text(json.dumps(read_config(MODEL) | sizes | {RANDOM_WEIGHTS: 0}))
    return folder


def generate(work: Work) -> Figures:
    """Greedy answers of uneven length."""
    arguments = GENERATED_TINY if work.tiny else GENERATED
    folder = write_model(work)
    with torch.device(work.device):  # 1.5B numbers take long to draw on a processor
        model = CausalModel(read_config(folder), folder).eval()
    model = model.to(torch.float32 if work.tiny else torch.bfloat16)
    return {"rows": arguments.rows, "answers": arguments.answers, **compare(model, arguments)}


def learn(work: Work) -> Figures:
    """Every weight is trained; the whole vocabulary is scored. Operations are those that torch counts."""
    rows, length = (ROWS_TINY, LENGTH_TINY) if work.tiny else (ROWS, LENGTH)
    device, dtype = torch.device(work.device), "float32" if work.tiny else "bfloat16"
    folder = write_model(work)
    known = Prompts(folder, chat=False, system="", template="{}").size
    spec = PolicySpec(1, length, discrete_actions=known)
    with device:
        policy = LanguagePolicy(spec, LanguageOptions(checkpoint=str(folder), dtype=dtype)).to(device)
    policy.model.known = policy.model.vocabulary
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(policy.prompts.end + 1, known, (rows, length), generator=random).to(device)
    inputs = Inputs(instruction=("Make 24 of 3, 8 and 1.",) * rows)

    def update() -> None:
        policy.evaluate(inputs, {"tokens": tokens}).log_prob.sum().backward()
        policy.zero_grad(set_to_none=True)

    machine = measure_machine(device, dtype)
    with FlopCounterMode(display=False) as counter:
        update()
    with peak_memory(device) as peak:
        update()
    taken = median(repeat(update, device, SECONDS_TINY if work.tiny else SECONDS))
    flops = counter.get_total_flops()
    return {
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "rows": rows,
        "length": length,
        "tokens_per_s": rows * length / taken,
        "mfu": flops / taken / machine.flops_per_s,
        "flops": flops,
        "matmul_flops_per_s": machine.flops_per_s,
        "peak_memory_bytes": peak.nbytes,
    }


def modes(work: Work) -> Figures:
    """Measured and predicted seconds of every mode of `countdown_grpo` with its 1,024 answers (`embodied compare`)."""
    config = load_config("countdown_grpo")
    sections: dict[str, Any] = {
        "policy": config.policy.model_copy(update={"device": work.device}),
        "runtime": config.runtime.model_copy(update={"mode": "inline" if work.tiny else "ray"}),
    }
    if work.tiny:
        sections["env"] = config.env.model_copy(update={"num_envs": 16})
        sections["optim"] = config.optim.model_copy(update={"minibatch": 8, "micro_batch": 8})
    found = compare_command(config.model_copy(update=sections), "countdown_grpo", work.scratch / "compare", None, 1)
    return found | {"largest_error": max(abs(row["error"]) for row in found["modes"])}
