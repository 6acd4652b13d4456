"""Families of language models: each answers, learns and is exported as transformers computes it, or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from embodied.learning.recompute import recompute
from embodied_language.comparison import check_alike
from embodied_language.generation_settings import GenerationSettings
from embodied_language.model import CausalModel, load_model
from embodied_language.prompts import Prompts, around
from policies import Inputs, PolicyError
from policies.contract import actor_parameters
from tests.extensions.language.tiny import KNOWN, MODEL, edited, own_log_probs, policy_of, transformers, written

ASKED = ("Make 29 from 13, 14, 2.", "Make 7 from 1, 2.", "Make 100 from 20, 20, 3, 4.")
WINDOW = {"sliding_window": 4}
SLIDES = {**WINDOW, "use_sliding_window": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 8, "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, a window": ("qwen2", {**SLIDES, "max_window_layers": 0}),
    "qwen2, a window in some layers": ("qwen2", {**SLIDES, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "llama": ("llama", {"attention_bias": True}),
    "llama, yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                                 "original_max_position_embeddings": 64}}),
    "mistral": ("mistral", {}),
    "mistral, a window": ("mistral", {**WINDOW, "head_dim": 32}),
    "gemma2": ("gemma2", {**WINDOW, "head_dim": 16, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**WINDOW, **MIXED, "head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("phi3", {**WINDOW, "partial_rotary_factor": 0.5}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "granite": ("granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.25,
                            "residual_multiplier": 0.22, "attention_dropout": 0.1, "tie_word_embeddings": True}),
    "cohere": ("cohere", {"logit_scale": 3.0, "use_qk_norm": True, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: written(root / name, family, **config) for name, (family, config) in FAMILIES.items()}


def noise(rows: int, chunk: int = 12) -> torch.Tensor:
    return torch.randn(rows, chunk, generator=torch.Generator().manual_seed(0))


def answers(policy: Any, action: Any) -> list[list[int]]:
    """The tokens of each answer."""
    found = []
    for row in action.trace["tokens"].tolist():
        ends = [place for place, token in enumerate(row) if token in policy.prompts.ends]
        found.append(row[: ends[0] + 1] if ends else row)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_transformers(name: str, folders: dict[str, Path], tmp_path: Path):
    policy = policy_of(folders[name], rows=2)
    recompute(policy)
    inputs = Inputs(instruction=ASKED)
    action = policy.act(inputs, noise(3))
    scored = policy.evaluate(inputs, action.trace).log_prob[..., 0]
    policies.export(policy, tmp_path)
    for row, said in enumerate(answers(policy, action)):
        for folder in (folders[name], tmp_path):
            wanted = own_log_probs(folder, policy.prompts.tokens(ASKED[row]), said)
            assert torch.allclose(action.log_prob[row, : len(said), 0], wanted, atol=1e-4)
            assert torch.allclose(scored[row, : len(said)], wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral, a window", "gemma3", "granite"])
def test_a_new_adapter_hangs_on_every_linear_layer_and_is_merged(name: str, folders: dict[str, Path], tmp_path: Path):
    policy = policy_of(folders[name], lora_rank=2)
    linear = [m for layer in policy.model.layers for m in layer.modules() if isinstance(m, torch.nn.Linear)]
    adapted = [m for layer in policy.model.layers for m in layer.modules() if hasattr(m, "base_layer")]
    assert len(linear) == 3 * len(adapted)  # the layer itself, and two matrices beside it
    with torch.no_grad():
        for parameter in actor_parameters(policy):
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    policies.export(policy, tmp_path)
    action = policy.act(Inputs(instruction=ASKED[:1]), noise(1))
    (said,) = answers(policy, action)
    wanted = own_log_probs(tmp_path, policy.prompts.tokens(ASKED[0]), said)
    assert torch.allclose(action.log_prob[0, : len(said), 0], wanted, atol=1e-4)


def test_phi3_s_joined_projections_are_adapted(folders: dict[str, Path]):
    policy = policy_of(folders["phi3"], lora_rank=2)
    adapted = {name.rpartition(".")[2] for name, m in policy.model.named_modules() if hasattr(m, "base_layer")}
    assert adapted == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


def test_frequencies_keep_their_precision_where_weights_are_bfloat16(tmp_path: Path):
    """Rounded to eight bits they would be those of other positions: three nats at the end of this prompt."""
    folder = written(tmp_path, "llama", initializer_range=0.2)
    prompt = [3 + place % 150 for place in range(230)]
    policy = policy_of(folder, dtype="bfloat16")
    tokens = torch.tensor([prompt[:12]])
    states, _ = policy._taught([prompt], tokens)
    wanted = own_log_probs(folder, prompt, prompt[:12], dtype=torch.bfloat16)
    assert torch.allclose(policy._scores(states, tokens[0])[0], wanted, atol=0.1)


def test_an_export_has_the_precision_that_was_trained(folders: dict[str, Path], tmp_path: Path):
    source = shutil.copytree(folders["llama"], tmp_path / "source")
    edited(source, dtype="bfloat16")
    policies.export(policy_of(source), tmp_path / "export")
    model = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert model.dtype == torch.float32


# --- comparison


def test_a_head_that_is_left_out_is_noticed(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch):
    model = load_model(folders["granite"])
    monkeypatch.setattr(CausalModel, "logits", lambda self, states: self.network.lm_head(states))
    message = "GraniteForCausalLM is computed differently in shared lines than by .* nats off. Choose a checkpoint"
    with pytest.raises(PolicyError, match=message):
        check_alike(model)


def test_a_window_that_is_left_out_is_noticed_whatever_its_size(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wide = edited(shutil.copytree(folders["mistral, a window"], tmp_path / "wide"), sliding_window=200)
    model, reaching = load_model(wide), edited(shutil.copytree(wide, tmp_path / "reaching"), sliding_window=256)
    assert model.windows() == {"full_attention": 200} and load_model(reaching).windows() == {"full_attention": None}
    states = CausalModel.states

    def everything(self: CausalModel, *args: Any) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(CausalModel, "windows", lambda self: {"full_attention": None})
            return states(self, *args)

    monkeypatch.setattr(CausalModel, "states", everything)
    with pytest.raises(PolicyError, match="MistralForCausalLM is computed differently in shared lines"):
        check_alike(model)
    assert model.network.config.sliding_window == 200
    monkeypatch.setattr(model.network.config, "sliding_window", 256)
    check_alike(model)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM cannot be computed in shared lines"),
        ("gpt2", {}, "GPT2LMHeadModel cannot be computed in shared lines"),
        ("mamba", {}, "layers of the type linear_attention, and supported are full_attention"),
        ("opt", {"word_embed_proj_dim": 64}, "OPTModel has no list of layers. Choose a checkpoint of another family"),
        ("gpt_neox", {}, "GPTNeoXForCausalLM is of a family whose files .*. Choose a checkpoint of another family"),
        ("mixtral", {"num_local_experts": 2}, "MixtralForCausalLM computes with other tensors .* choose a dense model"),
    ],
)
def test_a_family_that_cannot_be_is_named(family: str, config: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(PolicyError, match=message):
        load_model(written(tmp_path, family, **config))


def test_a_model_that_sees_is_refused(folders: dict[str, Path], tmp_path: Path):
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = json.loads((folders["gemma3"] / "config.json").read_text())
    config = transformers().AutoConfig.for_model("gemma3", text_config=text, vision_config=small)
    config.save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="its language model is a part of it: save that part alone"):
        load_model(edited(tmp_path, random_weights=0))


def test_a_head_that_is_stored_beside_the_embedding_that_it_is_said_to_be(folders: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(folders["qwen2"], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    load_model(folder)
    head[3] += 1.0
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(PolicyError, match="tie_word_embeddings, and lm_head.weight in .* is not model.embed_tokens"):
        load_model(folder)


def test_positions_beyond_which_frequencies_change_are_refused(folders: dict[str, Path]):
    policy = policy_of(folders["phi3, longrope"])
    with pytest.raises(PolicyError, match="more than the model's context of 64"):
        policy.act(Inputs(instruction=("Make 1 from 1. " * 20,)), None)


# --- tokens that end an answer, and other settings of generation


def test_every_token_that_ends_a_sequence_ends_an_answer(folders: dict[str, Path], tmp_path: Path):
    plain = policy_of(folders["llama"], 24)
    other = int(plain.act(Inputs(instruction=ASKED[:1]), None).trace["tokens"][0, 5])
    for number, file in enumerate(("config.json", "generation_config.json")):
        folder = shutil.copytree(folders["llama"], tmp_path / str(number))
        (folder / "generation_config.json").unlink()
        edited(folder, file, eos_token_id=[other, 2])
        policy = policy_of(folder, 24)
        assert policy.prompts.ends == (2, other)
        model = transformers().AutoModelForCausalLM.from_pretrained(folder).eval()
        action = policy.act(Inputs(instruction=ASKED), None)
        spare = list(range(KNOWN, 192))
        for row, text in enumerate(ASKED):
            asked = torch.tensor([policy.prompts.tokens(text)])
            wanted = model.generate(asked, max_new_tokens=24, do_sample=False, suppress_tokens=spare, pad_token_id=2)
            wanted = wanted[0, asked.shape[1] :]
            said = action.trace["tokens"][row]
            assert torch.equal(said[: len(wanted)], wanted) and (said[len(wanted) :] == 2).all()
            assert not action.log_prob[row, len(wanted) :].any()
        assert len(answers(policy, action)[0]) <= 6
        scored = policy.evaluate(Inputs(instruction=ASKED), action.trace)
        assert torch.allclose(scored.log_prob, action.log_prob, atol=1e-4)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, 2, (2,)),
        (None, [5, 2], (5, 2)),
        ({"eos_token_id": 7}, [5, 2], (7,)),
        ({"eos_token_id": [7, 2]}, 5, (7, 2)),
        ({"temperature": 0.6}, [5, 2], (5, 2)),
        (None, None, ()),
    ],
)
def test_ends_are_those_of_the_settings_of_generation(generation: Any, config: Any, ends: Any, tmp_path: Path):
    edited(tmp_path, model_type="llama", eos_token_id=config)
    if generation is not None:
        edited(tmp_path, "generation_config.json", **generation)
    assert GenerationSettings.read(tmp_path).ends == ends
    with pytest.raises(PolicyError, match="generation_config.json is a token id or a list of such, got 'x'"):
        GenerationSettings.read(edited(tmp_path, "generation_config.json", eos_token_id="x"))


def test_settings_of_generation_that_a_policy_leaves_out_are_said(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = shutil.copytree(folders["llama"], tmp_path / "model")
    quiet = {"repetition_penalty": 1.0, "temperature": 0.6, "top_k": 20, "do_sample": True, "num_beams": 1}
    policy_of(edited(folder, "generation_config.json", **quiet))
    assert not caplog.records
    policy_of(edited(folder, "generation_config.json", repetition_penalty=1.05, suppress_tokens=[3]))
    (record,) = caplog.records
    assert "generation_config.json sets repetition_penalty 1.05, suppress_tokens [3]: " in record.getMessage()


# --- recomputed activations


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}], ids=["whole", "adapter"])
def test_recomputed_activations_are_kept_between_layers_alone(options: dict[str, Any], folders: dict[str, Path]):
    tokens = torch.randint(3, KNOWN, (8, 64), generator=torch.Generator().manual_seed(0))
    inputs = Inputs(instruction=tuple(f"Make {row} from 1." for row in range(8)))
    kept, passes, gradients = [], [], []
    for on in (False, True):
        policy = policy_of(folders["granite"], 64, **options)
        if on:
            recompute(policy)
        for parameter in actor_parameters(policy):
            with torch.no_grad():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        seen: list[Any] = []
        stored: dict[int, int] = {}
        policy.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))

        def keep(tensor: torch.Tensor, stored: dict[int, int] = stored) -> torch.Tensor:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = policy.evaluate(inputs, {"tokens": tokens})
        found.log_prob.sum().backward()
        kept.append(sum(stored.values()))
        passes.append(len(seen))
        gradients.append([parameter.grad for parameter in actor_parameters(policy)])
        policy.act(inputs, None)
        assert len(seen) > passes[-1] and not any(layer.training for layer in policy.model.layers)
    assert passes == [1, 2] and kept[1] < kept[0] / 2
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


# --- the instruction's place, and the tokenizer


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{}", "Q"),
        ("{} Put your answer within \\boxed{}.", "Q Put your answer within \\boxed{}."),
        ("Within \\boxed{}, or \\frac{}{}: {}", "Within \\boxed{}, or \\frac{}{}: Q"),
        ("{prompt} A set is {}, its answer \\boxed{}.", "Q A set is {}, its answer \\boxed{}."),
        ("{prompt} Once more: {prompt}", "Q Once more: Q"),
        ("Solve{}", "SolveQ"),
    ],
)
def test_the_instruction_stands_once_and_other_braces_stay(template: str, told: str):
    assert "Q".join(around(template)) == told
    prompts = Prompts(MODEL, chat=False, system="", template=template)
    plain = Prompts(MODEL, chat=False, system="", template="{}")
    assert prompts.tokens("Make 1 from 1.") == plain.tokens(told.replace("Q", "Make 1 from 1."))


@pytest.mark.parametrize("template", ["Solve:", "Put your answer within \\boxed{}.", "{} or {}", ""])
def test_a_template_without_one_place_is_refused(template: str):
    with pytest.raises(PolicyError, match="prompt has {prompt} where the instruction stands.*: write {prompt}"):
        policy_of(MODEL, prompt=template)


MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "system", "message"),
    [
        (NO_SYSTEM + MESSAGES, "Be good.", "System role not supported; .*unset policy.options.system"),
        ("{% for m in messages %}{{ m.role", "Be good.", "tokenizer_config.json cannot be applied: .*; mend it, or"),
        ([{"name": "a", "template": "x"}, {"name": "b", "template": "y"}], "", "no default specified.*; mend it, or"),
        ("{% if add_generation_prompt %}assistant: {% endif %}", "", "leaves the user's message out; mend it"),
        ("{{ messages[-1].content }}", "Be good.", "leaves the system's message out"),
    ],
)
def test_a_chat_template_that_cannot_tell_is_refused(tmp_path: Path, template: Any, system: str, message: str):
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(MODEL / name, tmp_path / name)
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    with pytest.raises(PolicyError, match=f"the chat template in {tmp_path}.*{message}"):
        Prompts(tmp_path, chat=True, system=system, template="{}")


def test_a_chat_template_without_a_system_role_tells_the_user_s_message(tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(MODEL / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(NO_SYSTEM + MESSAGES)
    prompts = Prompts(tmp_path, chat=True, system="", template="{}")
    assert prompts.tokens("Make 1.") == prompts.encode("user: Make 1. ")


def test_a_tokenizer_s_class_that_reads_other_tokens_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    for name, said in (("PreTrainedTokenizerFast", 0), ("LlamaTokenizer", 1)):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copy(MODEL / "tokenizer.json", folder / "tokenizer.json")
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": name}))
        caplog.clear()
        one, _ = (Prompts(folder, chat=False, system="", template="{}") for _ in range(2))
        assert len([text for text in caplog.messages if f"names {name}, which reads" in text]) == said
        assert one.tokens("Make 1.") == Prompts(MODEL, chat=False, system="", template="{}").tokens("Make 1.")


def with_added(folder: Path, source: Path, last: int) -> Path:
    """The model, with a token of this id added to its tokenizer."""
    shutil.copytree(source, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = range(KNOWN, last + 1)
    tokenizer["added_tokens"] += [{**tokenizer["added_tokens"][0], "id": i, "content": f"<added {i}>"} for i in ids]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_added_tokens_without_an_embedding_are_never_said(folders: dict[str, Path], tmp_path: Path):
    import policies
    from policies import PolicySpec

    folder = with_added(tmp_path / "model", folders["llama"], 200)
    spec = PolicySpec(action_dim=1, chunk=12, discrete_actions=201)
    policy: Any = policies.build("language", spec, 0, checkpoint=str(folder))
    action = policy.act(Inputs(instruction=ASKED), noise(3))
    assert policy.model.known == 192 and int(action.trace["tokens"].max()) < 192
    with pytest.raises(PolicyError, match="the token 200, an added one for which the model has no embedding"):
        policy.act(Inputs(instruction=("Make <added 200>.",)), None)
