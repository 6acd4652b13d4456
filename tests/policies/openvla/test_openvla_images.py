"""Preprocessing against Pillow, TensorFlow's results, and its own promises."""

import numpy as np
import pytest
import torch

from policies import PolicyError
from policies.openvla.images import (
    Preprocessing,
    center_crop,
    jpeg,
    lanczos,
    read_preprocessing,
)
from policies.resampling import pillow_resize, resize
from tests.policies.openvla.cases import GOLDEN, OPENVLA, error, golden

LIBERO = golden(GOLDEN / "libero_images")


def frames(height: int, width: int, rows: int = 2) -> torch.Tensor:
    g = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (rows, height, width, 3), generator=g, dtype=torch.uint8)


def preprocessing(**options) -> Preprocessing:
    return read_preprocessing(OPENVLA / "checkpoint", **options)


@pytest.mark.parametrize(
    ("size", "target"),
    [
        ((256, 256), (224, 224)),
        ((128, 128), (224, 224)),
        ((37, 91), (28, 28)),
        ((90, 60), (101, 224)),
        ((64, 48), (28, 48)),
    ],
)
@pytest.mark.parametrize("name", ["bicubic", "bilinear"])
def test_batched_resize_equals_pillow_to_the_last_bit(size, target, name):
    pictures = frames(*size)
    height, width = target
    assert torch.equal(resize(pictures, height, width, name), pillow_resize(pictures, height, width, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bicubic", "bilinear", "lanczos"])
def test_resize_takes_the_installed_pillows_order_of_passes_at_every_size(name):
    """Pillow 13 shrinks the height of a tall picture first, which rounds in another place."""
    draw = np.random.default_rng(len(name))
    for size in [(320, 240), *draw.integers(2, 90, (150, 2)).tolist()]:
        pictures, (height, width) = frames(*size), draw.integers(2, 90, 2).tolist()
        assert torch.equal(resize(pictures, height, width, name), pillow_resize(pictures, height, width, name)), size


@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
@pytest.mark.parametrize("size", [(48, 64), (61, 45), (50, 50), (28, 28)])
def test_both_backends_give_the_same_pixels(size, strategy):
    pictures = frames(*size)
    batched, one_by_one = (preprocessing(strategy=strategy, backend=b)(pictures) for b in ("device", "pillow"))
    assert batched.shape == (2, 6, 28, 28) and torch.equal(batched, one_by_one)


def test_pixels_of_a_frame_do_not_depend_on_the_batch():
    pictures = frames(40, 40, rows=5)
    assert torch.equal(preprocessing()(pictures)[3:4], preprocessing()(pictures[3:4]))


def test_environment_resize_is_the_training_datas():
    turned = LIBERO["frame"][None].flip(1, 2)
    assert error(lanczos(turned, 224)[0], LIBERO["rotated_resized_nojpeg"]) <= 1


def test_frames_are_stored_as_the_training_datas_were():
    """As far as another decoder goes. Without the step, or without 4:2:0, ten levels are missing on average."""
    turned = LIBERO["frame"][None].flip(1, 2)
    wrong = (lanczos(jpeg(turned), 224)[0].double() - LIBERO["libero_224"].double()).abs()
    assert wrong.mean() < 1.5 and wrong.max() <= 8
    both = jpeg(torch.cat([turned, turned.flip(1)]))
    assert torch.equal(both[:1], jpeg(turned)) and both.dtype == torch.uint8


def test_center_crop_is_the_training_datas():
    crop = center_crop(LIBERO["libero_224"][None], 224)[0]
    assert error(crop[100:108], LIBERO["crop90_float_rows"]) <= 1e-5
    assert error((crop * 255.5).to(torch.uint8), LIBERO["crop90_224"]) <= 1


def test_options_are_applied_in_the_order_of_the_training_data():
    zeros, ones = ((0.0,) * 3,) * 2, ((1.0,) * 3,) * 2
    whole = Preprocessing(224, zeros, ones, environment_jpeg=True, environment_resize=True, center_crop=True)
    by_hand = center_crop(lanczos(jpeg(LIBERO["frame"][None]), 224), 224)
    by_hand = (by_hand * 255.5).to(torch.uint8).permute(0, 3, 1, 2).float() / 255
    assert torch.equal(whole(LIBERO["frame"][None]), torch.cat([by_hand, by_hand], 1))


@pytest.mark.parametrize(
    "wrong", [frames(28, 28).float(), frames(28, 28)[0], frames(28, 28)[..., :1], frames(28, 28).permute(0, 3, 1, 2)]
)
def test_frames_of_another_type_are_refused(wrong):
    with pytest.raises(PolicyError, match=r"frames must be uint8 \[B, H, W, 3\], got torch"):
        preprocessing()(wrong)


@pytest.mark.parametrize("option", [{"strategy": "stretch"}, {"backend": "cuda"}])
def test_unknown_options_list_the_known_ones(option):
    with pytest.raises(PolicyError, match="must be one of (resize-naive, letterbox, resize-crop|device, pillow), got"):
        preprocessing(**option)


def test_pictures_that_are_random_crops_already_get_no_centre_crop():
    frame, zeros, ones = LIBERO["frame"][None], ((0.0,) * 3,), ((1.0,) * 3,)
    acts_on_crop, whole = (Preprocessing(224, zeros, ones, center_crop=crop) for crop in (True, False))
    assert torch.equal(acts_on_crop(frame, cropped=True), whole(frame))
    assert not torch.equal(acts_on_crop(frame), whole(frame))
