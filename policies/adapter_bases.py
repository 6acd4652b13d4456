"""Which base an adapter belongs to, as far as names and tensors tell.

An adapter of a layer is A [r, in], B [out, r] and a scaling s; merged into its base W [out, in] it is W + s B A.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.contract import PolicyError
from policies.files import CONFIG, Shards, read_json, shown

WAY = "set policy.options.any_base to true to use it nevertheless"
MOST_NUMBERS = 3 * 10**8
"""Numbers of base matrices that are looked at: a dozen layers of a network of 7 billion."""
CERTAIN = 6.0
"""Standard errors that a share must be away from 0, or from 1, to be no coincidence."""
HUB = re.compile(r"models--(.+?)--(.+)")
"""Folder of a model in Hugging Face's cache: organisation and name."""


def check_named_base(adapter: Path, named: str, base: Path, state: Mapping[str, Tensor]) -> None:
    """Raise `PolicyError` if an adapter names another base than the one in the folder `base`, which has these tensors.

    A folder that is there is compared tensor by tensor. Of one that is not, and of a name on the Hub, the last part
    counts: it is compared with the folder's name, with its name in the Hub's cache, and with config.json's
    `_name_or_path`, unless the folder is called after the base and more, as fine-tunes are.
    """
    there = Path(named).expanduser()
    try:
        if there.is_dir() and (there / CONFIG).exists():
            if there.resolve() == base.resolve() or _same_tensors(there, state) is not False:
                return
            raise PolicyError(f"{adapter} is an adapter of another base: {named} has other weights than {base}; {WAY}")
    except OSError:  # a name that is too long for a path
        pass
    organisation, name = _parts(named)
    own_organisation, own = _parts(str(base.resolve()))
    if own_organisation and organisation and "/" in named and not named.startswith((".", "/", "~")):
        if (own_organisation, own) == (organisation, name):
            return
    elif own == name:
        return
    elif not own.startswith(name):
        said = read_json(base / CONFIG).get("_name_or_path") if (base / CONFIG).exists() else None
        if isinstance(said, str) and said and _parts(said)[1] == name:
            return
    raise PolicyError(
        f"{adapter} is an adapter of another base: it names {shown(named, 300)}, and the checkpoint is {base}. Set "
        f"policy.options.checkpoint to that base; if this is it under another name, {WAY}"
    )


def is_merged(state: Mapping[str, Tensor], adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool | None:
    """Whether an adapter is in the base's tensors already; None where they cannot tell.

    With the singular vectors u, v and values d of s B A, u' W v has d in it once the adapter is merged. The share of d
    is estimated over all directions; the noise is what u' W v is for vectors that do not belong together.
    """
    total, weight, numbers = 0.0, 0.0, 0
    shares: list[tuple[float, float]] = []
    for layer in sorted({name.rsplit(".lora_", 1)[0] for name in adapter}, key=_spread):
        w, a, b = (
            tensors.get(name)
            for tensors, name in (
                (state, f"{layer}.weight"), (adapter, f"{layer}.lora_A.weight"), (adapter, f"{layer}.lora_B.weight"),
            )
        )  # fmt: skip
        if w is None or a is None or b is None or not w.dim() == a.dim() == b.dim() == 2:
            continue
        if w.shape != (len(b), a.shape[1]) or len(a) != b.shape[1]:
            continue
        numbers += w.numel()
        if numbers > MOST_NUMBERS and shares:
            break
        u, d, v = _directions(a.float().cpu(), b.float().cpu(), scaling(config, layer, len(a)))
        found = u.T @ w.float().cpu() @ v
        off = found[~torch.eye(len(found), dtype=torch.bool)]
        # Of a low rank there are few numbers off the diagonal, which may all be small: no less than the matrix's own.
        spread = torch.stack([each.float().cpu().pow(2).mean() for each in (off, w) if each.numel()]).max()
        if not spread > 0 or not d.any():
            continue
        here = float((d * d).sum() / spread)
        total, weight = total + float((d * found.diagonal()).sum() / spread), weight + here
        shares.append((float((d * found.diagonal()).sum() / spread) / here, here**-0.5))
    if not weight > 0:
        return None
    share, error = total / weight, weight**-0.5
    if error * CERTAIN > 1:
        return None
    near = sum(abs(one - 1) <= 4 * spread + 0.05 for one, spread in shares)
    if abs(share - 1) <= 4 * error + 0.05 and near >= 0.9 * len(shares):
        return True
    return False if share < 0.5 else None


def scaling(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """PEFT's factor of an adapter of this rank."""
    from peft.utils.other import get_pattern_key

    patterns = config.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config.get("lora_alpha", 8))
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _directions(a: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """u [out, r], d [r], v [in, r] of s B A."""
    left, up = torch.linalg.qr(b)
    right, down = torch.linalg.qr(a.T)
    u, d, v = torch.linalg.svd(factor * up @ down.T)
    return left @ u[:, : len(d)], d, right @ v[: len(d)].T


def _same_tensors(folder: Path, state: Mapping[str, Tensor]) -> bool | None:
    """Whether the matrices of a directory are these; None where it has none by these names."""
    shards = Shards.find(folder)
    numbers, equal = 0, None
    for name in sorted(set(shards.files) & state.keys(), key=_spread):
        if state[name].dim() < 2:
            continue
        numbers += state[name].numel()
        if numbers > MOST_NUMBERS and equal:
            break
        stored = shards.tensor(name)
        # Rounded: the same base may have been read in float32 and in bfloat16.
        if stored.shape != state[name].shape or not torch.equal(stored.bfloat16(), state[name].cpu().bfloat16()):
            return False
        equal = True
    return equal


def _parts(name: str) -> tuple[str, str]:
    """Organisation, where one is said, and name of a model: of a name on the Hub, or a path."""
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    for part in parts:
        cached = HUB.fullmatch(part)
        if cached:
            return cached[1].lower(), cached[2].lower()
    hub = len(parts) == 2 and not name.startswith((".", "/", "~"))
    return parts[0].lower() if hub else "", parts[-1].lower() if parts else ""


def _spread(name: str) -> tuple[int, str]:
    """A key that sorts names so that the first few are of all parts of a network."""
    digits = re.findall(r"\d+", name)
    return (sum(map(int, digits)) * 7919 + len(name) * 104729) % 1009, name
