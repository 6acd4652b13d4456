"""The policy that is measured, and its inputs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import policies
from embodied.devices import find_device, settle
from embodied.errors import UserError
from embodied_bench.machine import Machine, choose_dtype
from embodied_bench.settings import BenchLearner, BenchPolicy, provenance
from policies.contract import Inputs, Policy, PolicySpec
from policies.openvla import sizes
from policies.openvla.config import read_config
from policies.openvla.model import OpenVLAModel, Sequence
from policies.openvla.oft import STOP, OpenVLAOFT
from policies.openvla.policy import TokenPolicy
from policies.pi0 import sizes as pi0_sizes
from policies.pi0.config import read_sizes
from policies.pi0.costs import Pi0Costs
from policies.pi0.policy import Pi0
from policies.random_weights import INSTRUCTION
from policies.work import Costs

CAMERA, WRIST = "camera", "wrist"
PROPRIO_DIM = 8
"""LIBERO's."""
COARSE = 8
"""Patches of colour along a side of the frames: noise of single pixels looks the same to a network that averages."""


@dataclass(frozen=True)
class Network:
    """The measured network, whatever the policy's kind."""

    module: nn.Module
    costs: Costs
    dtype: torch.dtype
    patches: int
    """Patches of one image."""
    prompt_tokens: int
    action_tokens: int


def network_of(policy: Policy) -> Network:
    """The network of a policy that `build` returned."""
    if isinstance(policy, Pi0):
        costs = Pi0Costs(policy)
        dtype = policy.network.projector.weight.dtype
        return Network(policy.network, costs, dtype, policy.sizes.patches, policy.sizes.prompt_len, costs.suffix_tokens)
    assert isinstance(policy, TokenPolicy)
    prompt, tokens = len(policy.prompts.tokens(INSTRUCTION)), policy.spec.chunk * policy.spec.action_dim
    return Network(
        policy.model, policy.costs(INSTRUCTION), policy.model.dtype, policy.model.config.patches, prompt, tokens
    )


def build(bench: BenchPolicy | BenchLearner, **options: Any) -> Policy:
    """The policy that the settings name, on its device, with its `options`. Raises `UserError`, `PolicyError`."""
    flow = bench.model in pi0_sizes.MODELS
    kind = "pi0" if flow else sizes.find(bench.model)[0]
    if (bench.checkpoint is None) != bench.random_weights:
        raise UserError(
            "say which weights to measure: --random-weights, or --checkpoint DIR"
            + (" (both are given)" if bench.random_weights else "")
        )
    if not bench.seconds > 0:
        raise UserError(f"seconds must be greater than 0, got {bench.seconds}")
    device = find_device(bench.device)
    named = {"asset": bench.unnorm_key} if flow else {"unnorm_key": bench.unnorm_key}
    options |= {"dtype": choose_dtype(bench.dtype, device), **named}
    # Random weights are drawn where they are needed: 15 GB take long to draw on a CPU, and to copy.
    where = torch.device(device) if bench.random_weights else contextlib.nullcontext()
    with _source(bench) as folder:
        spec = _flow_spec(folder, bench.model) if flow else _token_spec(folder, kind)
        try:
            with where:
                policy = policies.build(kind, spec, bench.seed, checkpoint=str(folder), **options)
            settle(policy, device)
        except torch.OutOfMemoryError as error:
            raise UserError(f"{bench.model} in {options['dtype']} does not fit into the memory of {device}") from error
    return policy


def _token_spec(folder: Path, kind: str) -> PolicySpec:
    chunk = sizes.CHUNK if kind == "openvla_oft" else 1
    return PolicySpec(sizes.ACTION_DIM, chunk, cameras=(CAMERA,), image_size=read_config(folder).image_size)


def _flow_spec(folder: Path, model: str) -> PolicySpec:
    """All actions that are predicted are executed; two cameras."""
    adaptive, _ = pi0_sizes.find(model)
    found, _ = read_sizes(folder, adaptive)
    proprio, size = 0 if adaptive else PROPRIO_DIM, found.vision.image_size
    return PolicySpec(sizes.ACTION_DIM, found.horizon, cameras=(CAMERA, WRIST), image_size=size, proprio_dim=proprio)


@contextlib.contextmanager
def _source(bench: BenchPolicy | BenchLearner) -> Iterator[Path]:
    if bench.checkpoint is not None:
        yield bench.checkpoint
        return
    write = pi0_sizes.write_random if bench.model in pi0_sizes.MODELS else sizes.write_random
    with tempfile.TemporaryDirectory() as folder:
        yield write(folder, bench.model, bench.seed)


def check_batches(batches: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Ascending, each once. Raises `UserError`."""
    if not batches or min(batches) < 1:
        raise UserError(f"{name} must be whole numbers of 1 or more, got {' '.join(map(str, batches)) or 'none'}")
    return tuple(sorted(set(batches)))


def make_inputs(policy: Policy, rows: int, seed: int, device: torch.device) -> Inputs:
    """Frames of random coarse patches, of the size that the network takes, a random state where the policy reads one,
    and one instruction for all rows."""
    generator = torch.Generator("cpu").manual_seed(seed)
    size, proprio_dim = policy.spec.image_size, policy.spec.proprio_dim

    def frames() -> torch.Tensor:
        coarse = torch.randint(0, 256, (rows, 3, COARSE, COARSE), generator=generator, device="cpu").float()
        fine = torch.nn.functional.interpolate(coarse, size=(size, size)).permute(0, 2, 3, 1).to(torch.uint8)
        return fine.contiguous().to(device)

    seen = {camera: frames() for camera in policy.spec.cameras}
    state = torch.randn(rows, proprio_dim, generator=generator, device="cpu").to(device) if proprio_dim else None
    return Inputs(frames=seen, proprio=state, instruction=(INSTRUCTION,) * rows)


def describe(bench: BenchPolicy | BenchLearner, policy: Policy, machine: Machine) -> dict[str, Any]:
    """The measured policy, and the machine."""
    network = network_of(policy)
    parameters = list(network.module.parameters())
    return provenance() | {
        "model": bench.model,
        "policy": policy.kind,
        "weights": f"random, seed {bench.seed}" if bench.checkpoint is None else str(bench.checkpoint),
        "dtype": str(network.dtype).removeprefix("torch."),
        "device": str(parameters[0].device),
        "software": {"torch": torch.__version__, "transformers": _version("transformers")},
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in parameters),
        "patches": network.patches,
        "prompt_tokens": network.prompt_tokens,
        "action_tokens": network.action_tokens,
        "matmul_flops_per_s": machine.flops_per_s,
        "memory_bytes_per_s": machine.bytes_per_s,
    }


def measured_here(result: Mapping[str, Any]) -> str:
    """The rates that limits come from, in words."""
    return (
        f"measured here: {result['matmul_flops_per_s'] / 1e12:,.2f} TFLOP/s, "
        f"{result['memory_bytes_per_s'] / 1e9:,.0f} GB/s"
    )


def results_table(title: str, unit: str) -> Table:
    """Columns of rates beside their limit."""
    table = Table(title=title)
    for column in ("", unit, "min-max", "limit", "of limit", "MFU", "memory"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def add_rates(table: Table, name: str, found: Mapping[str, Any], rate: str) -> None:
    """The row of a measurement, whose rates are called `rate`."""
    if "mfu" not in found:
        table.add_row(name, "no memory")
        return
    spread = f"{found[f'{rate}_min']:,.2f}-{found[f'{rate}_max']:,.2f}"
    shares = [f"{found[key]:.0%}" for key in ("share_of_limit", "mfu")]
    memory = f"{found['peak_memory_bytes'] / 1e9:.2f} GB"
    table.add_row(name, f"{found[rate]:,.2f}", spread, f"{found[f'limit_{rate}']:,.2f}", *shares, memory)


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


# --- Decisions as Hugging Face's libraries make them, one row after the other: the peer of the project's own
# policies.


Attention = Literal["eager", "sdpa"]


@dataclass(frozen=True)
class PeerCall:
    """A call of the library: method and attention."""

    method: Literal["loop", "generate"]
    attention: Attention

    @property
    def name(self) -> str:
        return f"{self.method} ({self.attention})"


LOOP = PeerCall("loop", "eager")
"""The peer of the figures' `ratio_to_peer`; ratios to the other calls stand beside it."""


def peer_calls(policy: TokenPolicy) -> tuple[PeerCall, ...]:
    """Calls of the library that can run the policy's network."""
    strongest = () if isinstance(policy, OpenVLAOFT) else (PeerCall("generate", "sdpa"),)
    return (LOOP, PeerCall("loop", "sdpa"), *strongest)


def rows_of(inputs: Inputs) -> list[Inputs]:
    """Inputs of one row each, without a look at the device."""
    return [
        Inputs(
            frames={name: frame[row : row + 1] for name, frame in inputs.frames.items()},
            proprio=None if inputs.proprio is None else inputs.proprio[row : row + 1],
            instruction=inputs.instruction[row : row + 1],
        )
        for row in range(len(inputs.instruction))
    ]


class OneAtATime:
    """A policy's greedy decisions by the library."""

    def __init__(self, policy: TokenPolicy, call: PeerCall) -> None:
        self.policy, self.call = policy, call
        self.llama = share(policy.model, call.attention)
        config = policy.model.config
        self._actions = (config.first_action_token, config.action_vocab)

    @torch.no_grad()
    def tokens(self, inputs: Inputs) -> Tensor:
        """int64 [B, K]: the decisions of the rows, one after the other."""
        return torch.cat([self._row(row) for row in rows_of(inputs)])

    def _row(self, inputs: Inputs) -> Tensor:
        policy = self.policy
        count = policy.spec.chunk * policy.spec.action_dim
        sequence = policy.prepare(inputs, count)
        if isinstance(policy, OpenVLAOFT):
            return self._whole(sequence, count, policy.stop)
        return self._loop(sequence, count) if self.call.method == "loop" else self._generate(sequence, count)

    def _loop(self, sequence: Sequence, count: int) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.llama.config)
        mask = sequence.valid.long()
        out = self.llama(inputs_embeds=sequence.embeddings, attention_mask=mask, past_key_values=cache, use_cache=True)
        tokens = [self._choose(out.logits[:, -1:])]
        for _ in range(count - 1):
            mask = functional.pad(mask, (0, 1), value=1)
            out = self.llama(input_ids=tokens[-1], attention_mask=mask, past_key_values=cache, use_cache=True)
            tokens.append(self._choose(out.logits[:, -1:]))
        return torch.cat(tokens, 1)

    def _generate(self, sequence: Sequence, count: int) -> Tensor:
        return self.llama.generate(
            inputs_embeds=sequence.embeddings,
            attention_mask=sequence.valid.long(),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            logits_processor=[self._only_actions],
        )

    def _whole(self, sequence: Sequence, count: int, stop: bool) -> Tensor:
        """OpenVLA-OFT's one pass, in which every token sees every other."""
        whole = sequence.extended(sequence.embeddings.new_zeros(1, count, sequence.embeddings.shape[2]))
        if stop:
            ids = torch.full((1, 1), STOP, device=sequence.positions.device)
            whole = whole.extended(self.policy.model.embed_tokens(ids))
        mask = whole.embeddings.new_zeros(1, 1, whole.columns, whole.columns)
        logits = self.llama(inputs_embeds=whole.embeddings, attention_mask=mask, use_cache=False).logits
        return self._choose(logits[:, sequence.columns - 1 : sequence.columns - 1 + count])

    def _choose(self, logits: Tensor) -> Tensor:
        """int64 [1, K]: the likeliest action token of logits [1, K, V]."""
        first, end = self._actions
        return logits.float()[..., first:end].argmax(-1) + first

    def _only_actions(self, _: Tensor, scores: Tensor) -> Tensor:
        first, end = self._actions
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, first:end] = scores[:, first:end]
        return allowed


def share(model: OpenVLAModel, attention: Attention) -> Any:
    """A `LlamaForCausalLM` with that attention which holds the model's own tensors, without adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = model.language_model
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(**{**model.config.llama, "attn_implementation": attention}))
    llama.load_state_dict(source.state_dict(), assign=True)
    llama.model.rotary_emb = source.model.rotary_emb
    # Neither of them ends a text here, and the library would warn of it each time.
    llama.generation_config.eos_token_id, llama.generation_config.pad_token_id = None, model.config.pad_token
    return llama.eval()
