"""Meshes that a picture of MuJoCo does not show are not drawn: those outside the camera's view, or outside a mirror's.

A picture drawn in software takes the time of its triangles, seen or not, and a mirror (a box of a reflecting material)
draws each of them once more. A mesh outside the view is hidden by a negative `dataid` of its geom. One that is in view
and not in the mirror is drawn in one of two passes of the same `mjr_render`, between which no Python runs. But the
display lists that are called can be chosen: what `glCallLists` calls depends on OpenGL's list base, which lists set.

    list               direct             pending            mirror
    base + mesh        draws the mesh     -                  nothing
    base + switch      nothing            base := mirror     base := direct

The columns are the values of the list base. It is `direct` until `mjr_render` calls the list of a mirror's surface,
which sets it to `pending`. The first geom of the scene has no surface, and its list calls the switch: once before the
meshes in the mirror, and once before those in view.
"""

# MuJoCo fills its name space from compiled modules, which type checkers cannot see.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.backends.mujoco_gl import mujoco

MARGIN = 0.01
"""Metres by which bounding spheres are enlarged: OpenGL moves a vertex by less than 1/100 of a pixel."""
OPAQUE = 0.995
"""Alpha from which on `mjr_render` takes a geom for opaque."""
GEOM, PLANE, BOX, MESH = (
    int(kind)
    for kind in (
        mujoco.mjtObj.mjOBJ_GEOM,
        mujoco.mjtGeom.mjGEOM_PLANE,
        mujoco.mjtGeom.mjGEOM_BOX,
        mujoco.mjtGeom.mjGEOM_MESH,
    )
)
LEAST_HEIGHT = 1e-3
"""Metres above a mirror from which on its view is computed: a pyramid with the eye as its apex."""

Vectors = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


class Culling:
    """Fills scenes of one model. Belongs to the OpenGL context that is current when it is made."""

    def __init__(self, model: mujoco.MjModel, scene: mujoco.MjvScene, target: mujoco.MjrContext) -> None:
        self._model, self._scene, self._perturb = model, scene, mujoco.MjvPerturb()
        self._gl: Any = importlib.import_module("OpenGL.GL")
        self._centres, self._radii = spheres(model)
        self._direct, self._unmirrored = self._make_lists(target)
        switch = scene.geoms[0]
        grey = np.array([0.5, 0.5, 0.5, 1.0], np.float32)
        mujoco.mjv_initGeom(switch, MESH, np.zeros(3), np.zeros(3), np.eye(3).ravel(), grey)
        switch.dataid = self._unmirrored + model.nmesh

    def _make_lists(self, target: mujoco.MjrContext) -> tuple[int, int]:
        """The list base `direct`, and the `dataid` of the first mesh that is not drawn in mirrors; after the last one
        comes the switch's."""
        gl, meshes, planes = self._gl, self._model.nmesh, target.rangePlane
        direct = gl.glGenLists(4 * (meshes + 1) + planes)
        pending, mirror, unmirrored, plane = (direct + i * (meshes + 1) for i in range(1, 5))

        def compile_list(name: int, *calls: tuple[Any, ...]) -> None:
            gl.glNewList(name, gl.GL_COMPILE)
            for call, *arguments in calls:
                call(*arguments)
            gl.glEndList()

        def by_base(index: int) -> tuple[Any, ...]:
            return gl.glCallLists, 1, gl.GL_UNSIGNED_INT, np.array([index], np.uint32)

        for mesh in range(meshes):
            compile_list(direct + mesh, (gl.glCallList, target.baseMesh + 2 * mesh))
            compile_list(unmirrored + mesh, by_base(mesh))
        compile_list(unmirrored + meshes, by_base(meshes))
        compile_list(pending + meshes, (gl.glListBase, mirror))
        compile_list(mirror + meshes, (gl.glListBase, direct))
        compile_list(plane, (gl.glCallList, target.basePlane), (gl.glListBase, pending))
        for index in range(1, planes):
            compile_list(plane + index, (gl.glCallList, target.basePlane + index))
        target.basePlane = plane
        return direct, unmirrored - target.baseMesh

    def fill(self, data: mujoco.MjData, option: mujoco.MjvOption, camera: mujoco.MjvCamera) -> None:
        """Fill the scene with what the camera sees; the context is current."""
        model, scene = self._model, self._scene
        scene.ngeom = 1  # the switch
        mujoco.mjv_addGeoms(model, data, option, self._perturb, mujoco.mjtCatBit.mjCAT_ALL.value, scene)
        mujoco.mjv_updateCamera(model, data, camera, scene)
        mujoco.mjv_makeLights(model, data, scene)
        self._gl.glListBase(self._direct)
        if scene.camera[0].orthographic or model.light_castshadow.any():  # what is outside the view may be seen so
            return
        geoms = [scene.geoms[i] for i in range(1, scene.ngeom)]
        mirror = _mirror(geoms)
        if mirror is not None and mirror.type == PLANE:  # of any size
            return
        rotations = data.geom_xmat.reshape(-1, 3, 3)
        centres = data.geom_xpos + (rotations @ self._centres[:, :, None])[:, :, 0]
        view = View(scene)
        seen = view.sees(centres, self._radii)
        mirrored = view.sees_in(mirror, centres, self._radii) if mirror is not None else np.zeros_like(seen)
        for geom in geoms:
            if geom.type == MESH and geom.objtype == GEOM and not mirrored[geom.objid]:
                geom.dataid = self._unmirrored + geom.dataid // 2 if seen[geom.objid] else -1


class View:
    """What a scene's camera sees, between the four sides of its pyramid and beyond its near plane."""

    def __init__(self, scene: mujoco.MjvScene) -> None:
        one, two = scene.camera[0], scene.camera[1]  # of two eyes, between which the picture is drawn

        def mean(name: str) -> Any:
            return (np.array(getattr(one, name), np.float64) + np.array(getattr(two, name), np.float64)) / 2

        self._eye, self._forward, self._near = mean("pos"), mean("forward"), float(mean("frustum_near"))
        up, right = mean("up"), np.cross(self._forward, mean("up"))
        bottom, top, centre = mean("frustum_bottom"), mean("frustum_top"), mean("frustum_center")
        half = mean("frustum_width") or (top - bottom) / 2
        slopes = ((right, centre + half), (-right, half - centre), (up, top), (-up, -bottom))
        self._sides = _units(np.array([slope * self._forward - self._near * axis for axis, slope in slopes]))

    def sees(self, centres: Vectors, radii: Vectors) -> Flags:
        """True for each sphere [N, 3], [N] of which a part may be in view."""
        offsets = centres - self._eye
        outside = (offsets @ self._sides.T < -radii[:, None]).any(axis=1)
        return ~(outside | (offsets @ self._forward < self._near - radii))

    def sees_in(self, mirror: mujoco.MjvGeom, centres: Vectors, radii: Vectors) -> Flags:
        """True for each sphere of which a part may be in view in the upper side of a box."""
        rotation, size = np.array(mirror.mat, np.float64), np.array(mirror.size, np.float64)
        normal, middle = rotation[:, 2], np.array(mirror.pos, np.float64) + size[2] * rotation[:, 2]
        height = (self._eye - middle) @ normal
        if height < -LEAST_HEIGHT:
            return np.zeros(len(centres), np.bool_)
        above = (centres - middle) @ normal >= -radii
        if height < LEAST_HEIGHT:
            return above
        # The mirrored eye sees through the side what the eye sees in it.
        eye = self._eye - 2 * height * normal
        across, along = size[0] * rotation[:, 0], size[1] * rotation[:, 1]
        corners = middle + np.array([across + along, along - across, -across - along, across - along])
        if not self.sees(middle[None], np.linalg.norm(size[None, :2], axis=1) + MARGIN)[0]:
            return np.zeros(len(centres), np.bool_)
        sides = _units(np.cross(corners - eye, np.roll(corners, -1, axis=0) - eye))
        return above & ~((centres - eye) @ sides.T < -radii[:, None]).any(axis=1)


def spheres(model: mujoco.MjModel) -> tuple[Vectors, Vectors]:
    """Centres [N, 3] in the geoms' frames and radii [N] of spheres around the model's geoms that are meshes, with a
    margin. Infinite ones around others."""
    centres, radii = np.zeros((model.ngeom, 3)), np.full(model.ngeom, np.inf)
    for geom in np.flatnonzero(model.geom_type == MESH):
        mesh = model.geom_dataid[geom]
        first = model.mesh_vertadr[mesh]
        points = model.mesh_vert[first : first + model.mesh_vertnum[mesh]].astype(np.float64)
        centres[geom] = (points.min(axis=0) + points.max(axis=0)) / 2
        radii[geom] = np.linalg.norm(points - centres[geom], axis=1).max() + MARGIN
    return centres, radii


def _mirror(geoms: list[mujoco.MjvGeom]) -> mujoco.MjvGeom | None:
    """The geom in which `mjr_render` draws the others: of all reflecting ones the first."""
    return next((g for g in geoms if g.type in (PLANE, BOX) and g.reflectance > 0 and g.rgba[3] >= OPAQUE), None)


def _units(vectors: Vectors) -> Vectors:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
