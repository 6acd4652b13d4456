"""A language model as a policy: it reads what is asked, and its actions are the tokens of the answer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from embodied_language.engine_clients import PROBE, EngineServers, servers_of
from embodied_language.engines import Drawing
from embodied_language.generation import Sampling, generate, read_longest, up_to_end
from embodied_language.generation_settings import GenerationSettings
from embodied_language.model import CausalModel, load_model, save_model
from embodied_language.packing import packed
from embodied_language.prompts import Prompts, around
from policies import lora
from policies.capabilities import PublishedWeights
from policies.contract import Action, Evaluation, Inputs, PolicyError, PolicySpec
from policies.errors import shown
from policies.files import ADAPTER_CONFIG, CONFIG
from policies.kinds import check_folders
from policies.layers import checked_noise, only_counted

_log = logging.getLogger(__name__)
BFLOAT16_TOLERANCE = 2e-2
LOGITS_AT_ONCE = 2**27
"""Numbers of the logits that are held at once: those of a large vocabulary take more memory than all else."""
Scored = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class LanguageOptions:
    """Which model, what it is told, how it answers, and what is trained.

    Raises `PolicyError` for a value that an option does not take.
    """

    checkpoint: str = ""
    """Directory of a causal language model, as transformers saves it."""
    weights: str = ""
    """Folder of a saved policy, whose tensors are taken instead of those of `checkpoint`; `policies.load` sets it."""
    dtype: str = "float32"
    """float32, bfloat16, or checkpoint: as stored."""
    chat: bool = False
    """True: the instruction is a user's message in the tokenizer's chat template."""
    system: str = ""
    """The system's message before it, with `chat`."""
    prompt: str = "{}"
    """Text around the instruction, which stands where `{prompt}` is, or the only `{}` that is no argument of a LaTeX
    command such as `\\boxed{}`."""
    temperature: float = 1.0
    top_p: float = 1.0
    rows: int = 64
    """Answers that are written side by side; more wait until one of these has ended."""
    engine: str = ""
    """Engine that writes a training run's answers: `sglang` or `vllm`, and the addresses of its servers, separated by
    spaces (`sglang http://127.0.0.1:30000`). Empty: the policy itself. Evaluations are always written by the policy."""
    engine_timeout_s: float = 240.0
    """Longest time that a batch of answers, or a weight sync, may take there."""
    lora_rank: int = 0
    """Rank of new adapters, which are then all of the network that is trained; 0: none."""
    lora_alpha: float = 0.0
    """0: as the rank."""
    adapter: str = ""
    """PEFT directory of an adapter, which is trained further."""
    value_per_action: bool = False
    """True: a value for each token of an answer, for `advantage.credit: action`; False: one for the answer."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise PolicyError(f"temperature must be greater than 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise PolicyError(f"top_p is a share greater than 0, at most 1, got {self.top_p}")
        if self.rows < 1:
            raise PolicyError(f"rows must be at least 1, got {self.rows}")
        if self.engine:
            servers_of(self.engine)  # raises for another text
        if self.engine_timeout_s <= 0:
            raise PolicyError(f"engine_timeout_s must be greater than 0, got {self.engine_timeout_s}")
        if self.lora_rank < 0 or (self.lora_rank and self.adapter):
            raise PolicyError(f"give lora_rank for a new adapter or adapter for a saved one, got {self.lora_rank}")
        around(self.prompt)  # raises for a text without the instruction's place
        if self.system and not self.chat:
            raise PolicyError("system is a message of a chat: set chat to true")


@cache
def _say(sentence: str) -> None:
    """Log a sentence once per process: files are checked before a run, and where a policy is built."""
    _log.warning("%s", sentence)


def check_files(architecture: Mapping[str, Any]) -> None:
    """Raise `PolicyError` if files that the options name are missing; log settings of generation that are left out."""
    if not architecture.get("checkpoint"):
        raise PolicyError("language needs a language model: set policy.options.checkpoint to its directory")
    check_folders(architecture)
    for name, file in (("checkpoint", CONFIG), ("adapter", ADAPTER_CONFIG)):
        folder = architecture.get(name)
        if folder and not (Path(folder) / file).is_file():
            raise PolicyError(f"policy.options.{name}: incomplete, {Path(folder) / file} is missing")
    settings = GenerationSettings.read(Path(architecture["checkpoint"]))
    if settings.left_out:
        listed = ", ".join(f"{name} {shown(value)}" for name, value in settings.left_out.items())
        _say(f"{settings.path} sets {listed}: transformers' generate applies that, the policy answers without it")


class LanguagePolicy(lora.AdaptedPolicy):
    """Answers an instruction in tokens; with `state`, goes on with the answer whose token ids the state holds.

    Reads `instruction`, and `state` [S]: the answer so far, -1 where there is no token yet, as `text/<task>` has it. A
    decision is up to C tokens, until one that ends an answer (`Prompts.ends`); beyond it the chunk has the tokenizer's
    end-of-sequence token. One number of the noise draws one token. Log-probs are at `temperature`, of the whole
    vocabulary.

    `trace["tokens"]` int64 [B, C] are the token ids. Imitation raises the demonstrated tokens' probability.
    """

    kind = "language"

    def __init__(self, spec: PolicySpec, options: LanguageOptions) -> None:
        """Raises `PolicyError` where model, task and options do not fit together."""
        super().__init__()
        check_files(asdict(options))
        if spec.cameras or spec.proprio_dim:
            raise PolicyError("language reads texts: set policy.reads to [instruction], or [instruction, state]")
        self.spec, self.options = spec, options
        self.noise_dim = spec.chunk
        source, weights = Path(options.checkpoint), Path(options.weights)
        saved_adapter = bool(options.weights) and (weights / ADAPTER_CONFIG).exists()
        self.model: CausalModel = load_model(
            weights if options.weights and not saved_adapter else source, options.dtype
        )
        self.prompts = Prompts(source, chat=options.chat, system=options.system, template=options.prompt)
        self._check_vocabulary()
        adapter = weights if saved_adapter else Path(options.adapter) if options.adapter else None
        if adapter is not None:
            config = lora.read_adapter_config(adapter)
            lora.check_base(self.model, adapter, config)
            lora.attach(self.model, config | {"inference_mode": False}, adapter / ADAPTER_CONFIG)
            lora.load_adapter(self.model, adapter)
        elif options.lora_rank:
            alpha = float(options.lora_alpha) or options.lora_rank
            lora.attach(
                self.model, {"r": options.lora_rank, "lora_alpha": alpha, "target_modules": self.model.linear_layers}
            )
        self.value_head = nn.Linear(self.model.width, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        if self.model.dtype != torch.float32:
            self.ratio_tolerance = BFLOAT16_TOLERANCE

    def _check_vocabulary(self) -> None:
        choices, known, rows = self.spec.discrete_actions, self.prompts.size, self.model.vocabulary
        if max(self.prompts.text_size, self.prompts.end + 1) > rows:
            raise PolicyError(
                f"the tokenizer of {self.options.checkpoint} has {known} tokens, and the model knows {rows}: put the "
                "model's own tokenizer into its folder"
            )
        if choices != known:
            raise PolicyError(
                f"the task is answered in {choices} tokens, and the model's tokenizer has {known}: set "
                f"env.options.tokenizer to {self.options.checkpoint}"
            )
        self.model.known = min(known, rows)

    # --- decisions

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        asked = self._asked(inputs)
        noise = None if noise is None else checked_noise(noise, self.noise_dim)
        sampling = Sampling(self.options.temperature, self.options.top_p, self.options.rows)
        limits = [self.spec.chunk if text else 1 for text in inputs.instruction]  # nothing is asked of one that rests
        first = not self.options.value_per_action
        answers = generate(self.model, asked, self.spec.chunk, self.prompts.ends, noise, sampling, limits, first)
        values = self._valued(answers.states)
        return Action(
            answers.tokens.float()[..., None],
            answers.log_prob[..., None],
            values if self.options.value_per_action else values[:, 0],
            {"tokens": answers.tokens},
        )

    def longest(self, inputs: Inputs, noise: Tensor) -> Mapping[str, Tensor]:
        sampling = Sampling(self.options.temperature, self.options.top_p, self.options.rows)
        asked, count = self._asked(inputs), self.spec.chunk
        read_longest(self.model, asked, count, noise, sampling)
        ends = set(self.prompts.ends)
        ongoing = next(token for token in range(self.model.known) if token not in ends)
        return {"tokens": torch.full((len(asked), count), ongoing)}

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        states, said = self._taught(self._asked(inputs), trace["tokens"])
        tokens = trace["tokens"][said.nonzero(as_tuple=True)]
        chosen, entropy = self._by_pieces(self._scores, states, tokens)
        values = self._placed(self._valued(states), said)
        return Evaluation(
            self._placed(chosen, said)[..., None],
            self._placed(entropy, said)[..., None],
            values if self.options.value_per_action else values[:, 0],
        )

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """[B]: the cross-entropy of each demonstrated answer, a sum over its tokens: a token weighs the same in a long
        answer as in a short one, as is usual for language models."""
        tokens = only_counted(actions, counted).squeeze(-1).round().long().clamp(0, self.model.known - 1)
        states, said = self._taught(self._asked(inputs), torch.where(counted, tokens, self.prompts.end))
        (losses,) = self._by_pieces(self._losses, states, tokens[said])
        return self._placed(losses, said).masked_fill(~counted, 0.0).sum(1)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        first = self._taught(self._asked(inputs), torch.full((len(inputs.instruction), 1), self.prompts.end))[0]
        values = self._valued(first)
        return values[:, None].expand(-1, self.spec.chunk) if self.options.value_per_action else values

    def _asked(self, inputs: Inputs) -> list[list[int]]:
        """The tokens before the answer's next one, of each row. Of an environment that rests, whose instruction is
        empty, the state is none of an answer."""
        if not inputs.instruction:
            raise PolicyError("language reads the instruction: add 'instruction' to policy.reads")
        asked = [list(self.prompts.tokens(text)) for text in inputs.instruction]
        if inputs.state is not None:
            answered = inputs.state.cpu().round().long().tolist()
            for row, text, so_far in zip(asked, inputs.instruction, answered, strict=True):
                row.extend(token for token in so_far if text and token >= 0)
        largest = max(map(max, asked)) if self.prompts.size > self.model.vocabulary else 0
        if largest >= self.model.vocabulary:
            raise PolicyError(
                f"a prompt has the token {largest}, an added one for which the model has no embedding (it has "
                f"{self.model.vocabulary}): take it out of the problem or of policy.options.prompt"
            )
        longest = max(map(len, asked))
        if longest + self.spec.chunk > self.model.context:
            raise PolicyError(
                f"a prompt of {longest} tokens and an answer of up to {self.spec.chunk} are more than the model's "
                f"context of {self.model.context}: leave out problems that are so long, take a model with a longer "
                "context, or set policy.chunk and env.max_episode_steps lower"
            )
        return asked

    def _taught(self, asked: Sequence[Sequence[int]], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[N, D] the states that predict the N tokens of the answers [B, C], and bool [B, C] where those tokens are: up
        to each answer's end, row by row.

        There is one pass, of which at most a tenth is padding (`packing`).
        """
        said = up_to_end(tokens, self.prompts.ends)
        answers = [row[mask].tolist() for row, mask in zip(tokens, said, strict=True)]
        whole = [[*prompt, *answer[:-1]] for prompt, answer in zip(asked, answers, strict=True)]
        parts = []
        one = packed(whole, self.model.network.device)
        states = self.model.states(one.tokens, one.seen, one.positions)
        for row, (line, begin) in enumerate(one.begin):
            first = begin + len(asked[row]) - 1
            parts.append(states[line, first : first + len(answers[row])])
        return torch.cat(parts), said

    def _scores(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Log-probs [N] of the tokens [N] that follow the states [N, D], and entropies [N], at the temperature."""
        every = torch.log_softmax(self.model.logits(states) / self.options.temperature, -1)
        return every.gather(-1, tokens[:, None]).squeeze(-1), -(every.exp() * every).sum(-1)

    def _losses(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """Cross-entropies [N] of the tokens [N] that follow the states [N, D]."""
        return (functional.cross_entropy(self.model.logits(states), tokens, reduction="none"),)

    def _by_pieces(self, score: Scored, states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """The score's tensors [N] of states and tokens; the logits of many tokens are computed piece by piece, and
        again in the backward pass."""
        size = max(1, LOGITS_AT_ONCE // self.model.known)
        if len(states) <= size:
            return score(states, tokens)
        pairs = zip(states.split(size), tokens.split(size), strict=True)
        pieces = [checkpoint(score, *pair, use_reentrant=False) for pair in pairs]
        return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))

    def _valued(self, states: Tensor) -> Tensor:
        """[..] the values of states [.., D]; the head has a precision of its own."""
        return self.value_head(states.to(next(self.value_head.parameters()).dtype)).squeeze(-1)

    def _placed(self, values: Tensor, said: Tensor) -> Tensor:
        """[B, C] the values [N] where the tokens are, 0 elsewhere."""
        return values.new_zeros(said.shape).masked_scatter(said, values)

    # --- what is trained, files

    @property
    def adaptable(self) -> lora.AdaptedModel:
        return self.model

    def shards(self) -> Sequence[Sequence[nn.Module]]:
        return [[layer] for layer in self.model.layers]

    def architecture(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.options).items() if name != "weights"}


class EngineWrittenPolicy(LanguagePolicy):
    """A language model whose answers of a training run an engine writes (`SampledElsewhere`)."""

    def publish(self, weights: PublishedWeights) -> None:
        new = weights.folder.with_name(f"{weights.folder.name}.part")
        for left in (new, weights.folder):
            shutil.rmtree(left, ignore_errors=True)
        save_model(self.model, new, lora.merged_state(self.model))
        new.rename(weights.folder)
        self._engine.update_weights(weights.folder, str(weights.folder))
        for other in weights.folder.parent.iterdir():
            if other.is_dir() and other != weights.folder:
                shutil.rmtree(other)

    @torch.no_grad()
    def sample(self, inputs: Inputs, weights: PublishedWeights) -> Action:
        asked, device, options = self._asked(inputs), self.model.network.device, self.options
        drawing = Drawing(self.spec.chunk, self.prompts.ends, options.temperature, options.top_p)
        rows = [row for row, text in enumerate(inputs.instruction) if text]  # nothing is asked of one that rests
        version = str(weights.folder)
        answers = self._engine.generate([asked[row] for row in rows], 1, drawing, version, weights.folder)
        tokens = torch.full((len(asked), self.spec.chunk), self.prompts.end, device=device)
        log_prob = torch.zeros(len(asked), self.spec.chunk, device=device)
        for row, answer in zip(rows, answers, strict=True):
            tokens[row, : len(answer.tokens)] = torch.tensor(answer.tokens, device=device)
            log_prob[row, : len(answer.tokens)] = torch.tensor(answer.log_prob, device=device)
        values = torch.zeros_like(log_prob)
        if any(bool(parameter.any()) for parameter in self.value_head.parameters()):  # else all values are 0
            states, said = self._taught(asked, tokens)
            values = self._placed(self._valued(states), said)
        return Action(
            tokens.float()[..., None],
            log_prob[..., None],
            values if options.value_per_action else values[:, 0],
            {"tokens": tokens},
        )

    @property
    def _engine(self) -> EngineServers:
        """The servers that `engine` names."""
        probe, timeout_s = self.prompts.encode(PROBE), self.options.engine_timeout_s
        return EngineServers.of(self.options.engine, timeout_s, probe, self.prompts.size)
