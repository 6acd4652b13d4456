"""Culling: a picture in software is drawn from the triangles that can reach one of its pixels.

A Panda has 135,000 triangles with three vertices of their own each, and in software a picture's time was that of its
vertices. In a picture of 128 x 128 pixels 15 of 16 triangles lie between the centres of the pixels, or beside the
picture, and colour nothing. Before a picture is drawn, NumPy finds them, and the scene is given meshes without them.

**Why no pixel changes.** A pixel is coloured by triangles that contain its centre, to which the rasteriser rounds
corners to 1/256 of a pixel. A triangle is left out if no centre is within `MARGIN` of it, if its corners are all behind
the camera's near plane, and never otherwise. Those that stay have their vertices, normals, texture coordinates,
material and matrix, and are drawn in their order. A back face stays too: a material may have two sides.

**How the scene is given them.** Every body of the scene gets a stand-in, an entity at the same pose. The bodies stay
where the task finds them, with their poses, materials and visibility, but in a shading mode that no pass of a camera
draws. They still cast shadows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import sapien
from sapien.render import RenderBodyComponent, RenderShapeTriangleMesh

from sim_farm.contract import Float32

Ints = npt.NDArray[np.integer[Any]]

HALF = np.float32(0.5)
"""Where a pixel's centre is."""

FEW = 300
"""Triangles of a mesh that is drawn whole."""

MANY = 100
"""Bodies of a scene that is drawn whole: adding them again for each picture takes as long as culling saves. The tasks
that draw have a body for each of 300 dots."""

MARGIN = np.float32(1 / 64)
"""Pixels by which a corner may lie beside where it is computed here. Half of it is for the rasteriser's rounding
(1/512), half for the arithmetic in float32."""

UNDRAWN = 99
"""A shading mode of bodies that no camera draws: SAPIEN's shaders have one or two."""


@dataclass(frozen=True)
class _Triangles:
    """A mesh with T triangles, in the order in which they are drawn, and P distinct positions."""

    points: Float32
    """[3, P], in m, before the shape's scale."""
    corners: Ints
    """[3, T], int32: numbers of the corners' points."""
    vertices: Float32
    """[T, 9]: the corners' positions; like this a triangle's are found with one access."""
    normals: Float32
    """[T, 9]."""
    uvs: Float32
    """[T, 6]."""

    def mesh(self, which: Ints, material: Any) -> RenderShapeTriangleMesh:
        """A shape of these triangles."""
        return RenderShapeTriangleMesh(
            self.vertices.take(which, 0).reshape(-1, 3),
            np.arange(3 * len(which), dtype=np.uint32).reshape(-1, 3),
            self.normals.take(which, 0).reshape(-1, 3),
            self.uvs.take(which, 0).reshape(-1, 2),
            material,
        )


_known: dict[bytes, _Triangles] = {}
"""By a digest of the mesh: a task that is rebuilt loads its robot again."""


def _triangles(part: Any) -> _Triangles:
    vertices, triangles = part.vertices, part.triangles
    normals, uvs = part.get_vertex_normal(), part.get_vertex_uv()
    digest = hashlib.blake2b()
    for array in (vertices, triangles, normals, uvs):
        digest.update(array.tobytes())
    found = _known.get(digest.digest())
    if found is None:
        rows = triangles.ravel().astype(np.intp)
        points, number = _distinct(vertices)
        found = _known[digest.digest()] = _Triangles(
            np.ascontiguousarray(points.T),
            np.ascontiguousarray(number[rows].reshape(-1, 3).T, np.int32),
            vertices[rows].reshape(-1, 9),
            normals[rows].reshape(-1, 9),
            uvs[rows].reshape(-1, 6),
        )
    return found


def _distinct(positions: Float32) -> tuple[Float32, Ints]:
    """[P, 3] the distinct ones, and [V] which of them each is. By bits, in two steps: NumPy sorts integers faster than
    rows."""
    x, y, z = np.ascontiguousarray(positions).view(np.uint32).astype(np.uint64).T
    number = np.unique(x << np.uint64(32) | y, return_inverse=True)[1].astype(np.uint64)
    _, first, number = np.unique(number << np.uint64(32) | z, return_index=True, return_inverse=True)
    return positions[first], number


class _Part:
    """One mesh of a body, of which some triangles are drawn."""

    def __init__(self, shape: Any, part: Any) -> None:
        self.triangles = _triangles(part)
        self.material = part.material
        self.pose, self.scale, self.front_face = shape.local_pose, shape.scale, shape.front_face
        points = self.triangles.points
        self.points = points if (self.scale == 1).all() else points * self.scale[:, None].astype(np.float32)
        self.radius = float(np.linalg.norm(self.points, axis=0).max())
        self.which: Ints | None = None
        """The triangles that were last drawn."""

    def shape(self) -> Any:
        assert self.which is not None
        found = self.triangles.mesh(self.which, self.material)
        found.scale, found.local_pose, found.front_face = self.scale, self.pose, self.front_face
        return found


@dataclass(eq=False)
class _StandIn:
    body: Any
    """The one that it stands in for, a `RenderBodyComponent`."""
    shapes: list[Any]
    """Shapes that are drawn whole, and `_Part`s."""
    mode: int
    """The body's shading mode."""
    entity: Any = field(default_factory=sapien.Entity)
    drawn: Any = None
    """The component that the entity has now."""

    @property
    def parts(self) -> Iterator[_Part]:
        return (shape for shape in self.shapes if isinstance(shape, _Part))

    def component(self) -> Any:
        found = RenderBodyComponent()
        for shape in self.shapes:
            if not isinstance(shape, _Part):
                found.attach(shape.clone())
            elif shape.which is not None and len(shape.which):
                found.attach(shape.shape())
        found.visibility, found.shading_mode = self.body.visibility, self.mode
        return found


class Culling:
    """What is drawn of a scene in place of its bodies. See the module."""

    def __init__(self, scene: sapien.Scene) -> None:
        self._scene = scene
        self._bodies: set[Any] = set()
        """Those of the scene and the stand-ins', as they were left."""
        self._stand_ins: list[_StandIn] = []
        """In the order in which they are drawn."""
        self._parts: list[tuple[_StandIn, _Part]] = []

    def update(self, cameras: Sequence[Any]) -> None:
        """Give the scene what these cameras see, before their pictures are taken."""
        if set(self._scene.render_system.render_bodies) != self._bodies:
            self._begin()
        changed = self._select(cameras)
        for stand_in in self._stand_ins:
            stand_in.entity.pose = stand_in.body.entity.pose
            if stand_in.drawn is not None and stand_in.drawn.visibility != stand_in.body.visibility:
                stand_in.drawn.visibility = stand_in.body.visibility
        first = next((i for i, stand_in in enumerate(self._stand_ins) if stand_in in changed), None)
        if first is None:
            return
        # Bodies are drawn in the order in which they were added. All are removed before one is added: SAPIEN goes
        # through all objects whenever one is added after others were removed.
        after = self._stand_ins[first:]
        for stand_in in after:
            if stand_in.drawn is not None:
                stand_in.entity.remove_component(stand_in.drawn)
        for stand_in in after:
            if stand_in in changed:
                stand_in.drawn = stand_in.component()
            stand_in.entity.add_component(stand_in.drawn)
        self._bodies = set(self._scene.render_system.render_bodies)

    def _begin(self) -> None:
        """Find the bodies of the scene, which are others than they were."""
        for stand_in in self._stand_ins:
            stand_in.body.shading_mode = stand_in.mode
            self._scene.remove_entity(stand_in.entity)
        bodies = [body for body in self._scene.render_system.render_bodies if body.render_shapes]
        bodies.sort(key=lambda body: body.render_shapes[0].per_scene_id)
        self._stand_ins = [
            _StandIn(body, [one for shape in body.render_shapes for one in _parts(shape)], body.shading_mode)
            for body in (bodies if len(bodies) <= MANY else ())
        ]
        for stand_in in self._stand_ins:
            stand_in.body.shading_mode = UNDRAWN
            self._scene.add_entity(stand_in.entity)
        self._parts = [(stand_in, part) for stand_in in self._stand_ins for part in stand_in.parts]
        starts = np.cumsum([0, *(part.points.shape[1] for _, part in self._parts)], dtype=np.int32)
        self._spans = [slice(*span) for span in zip(starts[:-1], starts[1:], strict=True)]
        self._corners = np.concatenate(
            [part.triangles.corners + start for (_, part), start in zip(self._parts, starts, strict=False)]
            or [np.empty((3, 0))],
            axis=1,
        )
        self._ends = np.cumsum([part.triangles.corners.shape[1] for _, part in self._parts])
        self._window = np.empty((3, starts[-1]), np.float32)
        self._bodies = set(self._scene.render_system.render_bodies)

    def _select(self, cameras: Sequence[Any]) -> set[_StandIn]:
        """Note which triangles of each part are drawn; returns the stand-ins that need another component."""
        changed = {stand_in for stand_in in self._stand_ins if stand_in.drawn is None}
        if not self._parts:
            return changed
        seen = [self._reaching(camera) for camera in cameras]
        kept = seen[0] if len(seen) == 1 else np.unique(np.concatenate(seen))
        for (stand_in, part), which, end in zip(
            self._parts, np.split(kept, np.searchsorted(kept, self._ends[:-1])), self._ends, strict=True
        ):
            which = which - (end - part.triangles.corners.shape[1])
            if part.which is None or not np.array_equal(part.which, which):
                part.which = which
                changed.add(stand_in)
        return changed

    def _reaching(self, camera: Any) -> Ints:
        """The triangles that may contain the centre of a pixel of the camera, in rising order."""
        width, height = camera.width, camera.height
        lens = np.array([[width / 2, 0, width / 2], [0, height / 2, height / 2], [0, 0, 1]])
        lens = lens @ camera.get_projection_matrix().astype(np.float64)[[0, 1, 3]]
        view = np.linalg.inv(camera.get_model_matrix().astype(np.float64))
        away, scale = np.linalg.norm(view[:3, 3]), np.linalg.norm(lens[:2, :3])
        near = 0.999 * camera.near if camera.mode == "perspective" else -np.inf
        crossing = []
        for (stand_in, part), span, end in zip(self._parts, self._spans, self._ends, strict=True):
            pose = stand_in.body.entity.pose
            place = (lens @ view @ (pose * part.pose).to_transformation_matrix()).astype(np.float32)
            window = self._window[:, span]
            np.matmul(place[:, :3], part.points, out=window)
            window += place[:, 3:]
            # A position is off by 2^-21 of the largest number that it is computed from, or less; nearer than this, that
            # is more than half the margin.
            reach = away + np.linalg.norm(pose.p) + np.linalg.norm(part.pose.p) + part.radius
            unsure = window[2] < max(near, scale * reach * 2.0**-20 / MARGIN)
            if unsure.any():
                corners = part.triangles.corners
                some = unsure.take(corners).any(0) & ~(window[2] < near).take(corners).all(0)
                crossing.append(np.flatnonzero(some) + (end - corners.shape[1]))
                window[2, unsure] = np.nan  # no comparison with it is true
        x, y, depth = self._window
        x /= depth
        y /= depth
        kept = _containing(x, y, (width, height), self._corners)
        return np.sort(np.concatenate([kept, *crossing])) if crossing else kept


def _parts(shape: Any) -> list[Any]:
    """A shape's meshes as `_Part`s; the shape itself where it has few triangles, or tangents that matter."""
    meshes = shape.parts if isinstance(shape, RenderShapeTriangleMesh) else []
    if sum(len(mesh.triangles) for mesh in meshes) < FEW or any(mesh.material.normal_texture for mesh in meshes):
        return [shape]
    return [_Part(shape, mesh) for mesh in meshes]


def _containing(x: Float32, y: Float32, size: tuple[int, int], corners: Ints) -> Ints:
    """Numbers of the triangles that may contain a centre. `x`, `y`: [P], pixels; `corners`: [3, T]."""
    kept = np.arange(corners.shape[1])
    for along, pixels in ((x, size[0]), (y, size[1])):
        first, last = _centres(along.clip(0, pixels), corners)
        inside = np.flatnonzero(first <= last)
        kept, corners = kept.take(inside), corners.take(inside, 1)
    # Most that are left have one centre in their bounding box. If it is on the left of one edge and on the right of
    # another, it is outside.
    (left, right), (low, high) = _centres(x, corners), _centres(y, corners)
    xs, ys = x.take(corners) - (left + HALF), y.take(corners) - (low + HALF)
    on_left, on_right = np.zeros((2, len(kept)), np.bool_)
    for i, j in ((0, 1), (1, 2), (2, 0)):
        dx, dy = xs[j] - xs[i], ys[j] - ys[i]
        side, margin = dy * xs[i] - dx * ys[i], MARGIN * (np.abs(dx) + np.abs(dy))
        on_left |= side < -margin
        on_right |= side > margin
    return kept[~((left == right) & (low == high) & on_left & on_right)]


def _centres(along: Float32, corners: Ints) -> tuple[Float32, Float32]:
    """The first and the last pixel along an axis whose centres are within the triangles' bounding boxes."""
    a, b, c = (along.take(corner) for corner in corners)
    low, high = np.minimum(np.minimum(a, b), c), np.maximum(np.maximum(a, b), c)
    return np.ceil(low - (MARGIN + HALF)), np.floor(high + (MARGIN - HALF))
