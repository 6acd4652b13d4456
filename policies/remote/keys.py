"""Keys of the observations that go to a policy server, for each of the names used here.

| here | key, unless a mapping says otherwise |
|---|---|
| `images.NAME` of the first camera | `observation/image` |
| `images.NAME` of the second camera | `observation/wrist_image` |
| `proprio` | `observation/state` |
| `state` | `observation/environment_state` |
| `instruction` | `prompt` |

The keys are those of openpi's LIBERO client, whose state is the robot's proprioception as LIBERO's backend here has it:
the gripper's position, its orientation as axis-angle, and the fingers' positions (examples/libero/main.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.errors import PolicyError, nearest, shown

CAMERA = "images."
PICTURES = ("observation/image", "observation/wrist_image")
VECTORS = {"proprio": "observation/state", "state": "observation/environment_state"}
TEXT = {"instruction": "prompt"}


def keys_of(cameras: Sequence[str], given: Mapping[str, str] | None) -> dict[str, str]:
    """Key by name, for these cameras in order: openpi's, with those that are `given` in their place.

    Raises `PolicyError` for a name that is not here, for a camera without a key, and for a key that two names have.
    """
    given = {} if given is None else given
    names = [*VECTORS, *TEXT, *(f"{CAMERA}{camera}" for camera in cameras)]
    for name, key in given.items():
        if name not in names:
            raise PolicyError(f"keys names {shown(name)}{nearest(str(name)[:100], names)}")
        if not isinstance(key, str):
            raise PolicyError(f"keys has {shown(key)} for {name}: a key is a text")
    pictures = {f"{CAMERA}{camera}": key for camera, key in zip(cameras, PICTURES, strict=False)}
    keys = {**VECTORS, **TEXT, **pictures, **given}
    for name in names:
        if name not in keys:
            raise PolicyError(
                f"the camera {name.removeprefix(CAMERA)} has no key: openpi's LIBERO client has two pictures; name its "
                f"key in keys, {{{name}: KEY}}"
            )
    twice = next((key for key in keys.values() if list(keys.values()).count(key) > 1), None)
    if twice is not None:
        raise PolicyError(
            f"keys gives the key {twice!r} to two names: {', '.join(n for n in keys if keys[n] == twice)}"
        )
    return keys
