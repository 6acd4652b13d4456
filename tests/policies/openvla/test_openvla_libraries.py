"""The network against timm and transformers used as their documentation says: whole towers, no cache, no padding."""

import torch

from policies.openvla.action_tokens import choose, decode, score
from policies.openvla.config import TOWERS, read_config
from policies.openvla.model import OpenVLAModel, build_tower, from_checkpoint, load_model
from policies.openvla.oft import chunk_states
from tests.policies.openvla.cases import error


def batch(model: OpenVLAModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images [3, 1, 6, 28, 28] and prompts of 9, 5 and 2 tokens, padded on the right."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 90, (3, 9), generator=g)
    lengths = torch.tensor([9, 5, 2])
    ids[torch.arange(9) >= lengths[:, None]] = model.config.pad_token
    return torch.randn(3, 1, 6, 28, 28, generator=g), ids, lengths


def row_by_row(model: OpenVLAModel):
    """The embeddings [1, T, D] of each row, without padding."""
    pixels, ids, lengths = batch(model)
    for row, length in enumerate(lengths):
        text = model.embed_tokens(ids[row : row + 1, :length])
        yield torch.cat([text[:, :1], model.embed_images(pixels[row : row + 1]), text[:, 1:]], 1)


def test_features_are_those_of_timms_whole_towers(tiny):
    model, config = load_model(tiny), read_config(tiny)
    stored = {from_checkpoint(name): tensor for name, tensor in model.checkpoint_state().items()}
    pixels = batch(model)[0].flatten(0, 1)
    for tower, name, sizes, part, found in zip(
        TOWERS,
        config.towers,
        config.tower_sizes or (),
        pixels.split(3, 1),
        model.vision_backbone.features(pixels),
        strict=True,
    ):
        whole = build_tower(name, sizes, 28).eval()
        prefix = f"vision_backbone.{tower}."
        whole.load_state_dict({key.removeprefix(prefix): t for key, t in stored.items() if key.startswith(prefix)})
        second_to_last = len(whole.blocks) - 2
        (expected,) = whole.get_intermediate_layers(part, n=[second_to_last])
        assert error(found, expected) <= 1e-6


@torch.no_grad()
def test_batched_decoding_is_a_loop_without_cache_over_single_rows(tiny):
    model = load_model(tiny)
    noise = torch.randn(3, 7, generator=torch.Generator().manual_seed(2))
    pixels, ids, lengths = batch(model)
    together = decode(model, model.sequence(model.embed_images(pixels), ids, lengths), 7, noise, 1.3)
    for row, embeddings in enumerate(row_by_row(model)):
        for k in range(7):
            logits = model.language_model(inputs_embeds=embeddings).logits[:, -1, 256:512]
            choice = choose(logits, noise[row : row + 1, k], 1.3)
            assert int(choice) + 256 == int(together.tokens[row, k])
            assert error(score(logits, choice, 1.3)[0], together.log_prob[row, k : k + 1]) <= 2e-5
            embeddings = torch.cat([embeddings, model.embed_tokens(choice + 256)[:, None]], 1)


@torch.no_grad()
def test_chunk_states_are_full_attention_over_single_rows(tiny):
    model = load_model(tiny)
    pixels, ids, lengths = batch(model)
    together = chunk_states(model, model.sequence(model.embed_images(pixels), ids, lengths), 14, stop=True)
    stop = model.embed_tokens(torch.tensor([[2]]))
    for row, embeddings in enumerate(row_by_row(model)):
        columns = embeddings.shape[1]
        whole = torch.cat([embeddings, torch.zeros(1, 14, embeddings.shape[2]), stop], 1)
        everything = torch.zeros(1, 1, whole.shape[1], whole.shape[1])  # added to the scores: nothing is masked
        hidden = model.language_model.model(inputs_embeds=whole, attention_mask=everything).last_hidden_state
        assert error(together[row : row + 1], hidden[:, columns - 1 : columns + 13]) <= 2e-5
