"""A canvas leaves out meshes that a picture does not show, shadows that nothing casts, and textures that it has
already; its pictures are those that MuJoCo draws of all."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sim_farm.backends.mujoco_culling import MARGIN, Culling, View, spheres
from sim_farm.backends.mujoco_gl import Canvas, mujoco

SIZE = 48
MESHES = 40


def model_xml(mirror: str = "box") -> str:
    """Tetrahedra that lie about a mirror, some of them transparent, before a sky."""
    draw = np.random.default_rng(0)
    meshes, geoms = [], []
    for index in range(MESHES):
        points = " ".join(f"{x:.4f}" for x in draw.uniform(-0.2, 0.2, 12))
        position = " ".join(f"{x:.4f}" for x in draw.uniform((-2, -2, -0.6), (2, 2, 1.6)))
        colour = " ".join(f"{x:.3f}" for x in (*draw.uniform(0.2, 1, 3), 0.5 if index % 9 == 4 else 1))
        meshes.append(f'<mesh name="m{index}" vertex="{points}"/>')
        geoms.append(f'<geom type="mesh" mesh="m{index}" pos="{position}" rgba="{colour}"/>')
    return f"""
    <mujoco>
      <asset>
        <texture type="skybox" builtin="gradient" rgb1=".3 .5 .7" rgb2="0 0 0" width="16" height="96"/>
        <material name="mirror" reflectance=".6" rgba=".3 .3 .3 1"/>
        {"".join(meshes)}
      </asset>
      <worldbody>
        <light pos="0 0 4" castshadow="false"/>
        {"".join(geoms[::2])}
        <geom type="{mirror}" size=".7 .5 .1" euler="10 -15 20" material="mirror"/>
        <geom type="box" size=".1 .2 .1" pos="0 .6 .3"/>
        {"".join(geoms[1::2])}
        <camera name="front" pos="2 0 1.2" xyaxes="0 1 0 -.5 0 1"/>
      </worldbody>
    </mujoco>"""


@dataclass(frozen=True)
class Drawing:
    """A model, and what draws it."""

    model: mujoco.MjModel
    data: mujoco.MjData
    canvas: Canvas

    @property
    def target(self) -> Any:
        return self.canvas._target

    def ours(self, camera: mujoco.MjvCamera) -> np.ndarray:
        frame = np.empty((SIZE, SIZE, 3), np.uint8)
        self.canvas.draw(self.data, camera, frame)
        return frame

    def all_drawn(self, camera: mujoco.MjvCamera) -> np.ndarray:
        """The picture of a scene as MuJoCo fills it, in the same context."""
        scene, frame = mujoco.MjvScene(self.model, maxgeom=100), np.empty((SIZE, SIZE, 3), np.uint8)
        kind, rect, target = mujoco.mjtCatBit.mjCAT_ALL.value, mujoco.MjrRect(0, 0, SIZE, SIZE), self.target
        mujoco.mjv_updateScene(self.model, self.data, mujoco.MjvOption(), None, camera, kind, scene)
        mujoco.mjr_render(rect, scene, target)
        mujoco.mjr_readPixels(frame, None, rect, target)
        return frame[::-1]

    def left_out(self) -> tuple[int, int]:
        """Meshes of the last picture that were drawn nowhere, and those that were not drawn in the mirror alone."""
        scene = self.canvas._scene
        lists = [geom.dataid for geom in (scene.geoms[i] for i in range(1, scene.ngeom)) if geom.type == 7]
        return sum(number < 0 for number in lists), sum(number >= 2 * self.model.nmesh for number in lists)


def drawing_of(xml: str) -> Iterator[Drawing]:
    model = mujoco.MjModel.from_xml_string(xml)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with closing(Canvas(model, SIZE)) as canvas:
        if canvas._culling is None:  # a GPU draws
            canvas._culling = Culling(model, canvas._scene, canvas._target)
        yield Drawing(model, data, canvas)


@pytest.fixture
def drawing() -> Iterator[Drawing]:
    yield from drawing_of(model_xml())


def cameras(number: int) -> Iterator[mujoco.MjvCamera]:
    draw = np.random.default_rng(1)
    for _ in range(number):
        camera = mujoco.MjvCamera()
        camera.lookat[:] = draw.uniform(-0.7, 0.7, 3)
        camera.distance, camera.azimuth = draw.uniform(0.3, 3), draw.uniform(0, 360)
        camera.elevation = draw.uniform(-90, 40)
        yield camera


def test_pictures_equal_those_of_all_meshes(drawing: Drawing) -> None:
    nowhere = unmirrored = mirrored = 0
    for camera in cameras(60):
        ours = drawing.ours(camera)
        hidden, direct = drawing.left_out()
        np.testing.assert_array_equal(ours, drawing.all_drawn(camera))
        nowhere, unmirrored, mirrored = nowhere + hidden, unmirrored + direct, mirrored + MESHES - hidden - direct
    assert min(nowhere, unmirrored, mirrored) > 100, "each kind is among the pictures"


def test_what_is_left_out_is_not_in_the_mirror_alone(drawing: Drawing) -> None:
    """The mirror's picture is there: without it other pixels differ."""
    camera = next(cameras(1))
    camera.lookat[:], camera.distance, camera.elevation = 0, 2.5, -60
    ours = drawing.ours(camera)
    assert drawing.left_out()[1] > 0
    drawing.canvas._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
    assert (drawing.ours(camera) != ours).any()


@pytest.mark.parametrize(
    "xml", [model_xml("plane"), model_xml().replace('castshadow="false"', "")], ids=["plane", "shadows"]
)
def test_all_are_drawn_where_they_show_elsewhere(xml: str) -> None:
    """A mirror without an edge shows what is outside the view, and a shadow falls from it."""
    for drawing in drawing_of(xml):
        for camera in cameras(10):
            ours = drawing.ours(camera)
            assert drawing.left_out() == (0, 0)
            np.testing.assert_array_equal(ours, drawing.all_drawn(camera))


def test_spheres_hold_their_meshes(drawing: Drawing) -> None:
    model = drawing.model
    centres, radii = spheres(model)
    for geom in range(model.ngeom):
        mesh = model.geom_dataid[geom]
        if mesh < 0:
            assert radii[geom] == np.inf
            continue
        points = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
        furthest = np.linalg.norm(points - centres[geom], axis=1).max()
        assert furthest + MARGIN == pytest.approx(radii[geom])


def test_a_point_is_in_view_where_its_pixel_is_in_the_picture(drawing: Drawing) -> None:
    draw, model = np.random.default_rng(2), drawing.model
    drawing.canvas.draw(drawing.data, model.camera("front").id, np.empty((SIZE, SIZE, 3), np.uint8))
    points = draw.uniform(-3, 3, (500, 3))
    position, rotation = drawing.data.cam_xpos[0], drawing.data.cam_xmat[0].reshape(3, 3)
    x, y, z = ((points - position) @ rotation).T
    tangent = np.tan(np.radians(model.cam_fovy[0]) / 2)
    within = (np.abs(x) < -z * tangent) & (np.abs(y) < -z * tangent)
    near = model.vis.map.znear * model.stat.extent
    np.testing.assert_array_equal(View(drawing.canvas._scene).sees(points, np.zeros(500)), within & (-z >= near))
    assert 20 < within.sum() < 400


def test_equal_textures_are_there_once(tmp_path: Path) -> None:
    colours = {"one": (1, 0, 0), "two": (0, 1, 0), "three": (1, 0, 0), "four": (1, 0, 0)}
    files = {name: tmp_path / f"{name}.png" for name in colours}
    for name, file in files.items():
        shape = (32, 8, 3) if name == "four" else (16, 16, 3)  # as many bytes of the same value
        Image.fromarray(np.full(shape, colours[name], np.uint8) * 255).save(file)
    textures = "".join(f'<texture type="2d" name="{name}" file="{file}"/>' for name, file in files.items())
    materials = "".join(f'<material name="{name}" texture="{name}"/>' for name in colours)
    boxes = "".join(
        f'<geom type="box" size=".3 .3 .3" pos="0 {y} 0" material="{name}"/>'
        for y, name in zip((-1.2, -0.4, 0.4, 1.2), colours, strict=True)
    )
    view = '<camera name="front" pos="4 0 1" xyaxes="0 1 0 -.2 0 1"/>'
    xml = f"<mujoco><asset>{textures}{materials}</asset><worldbody>{boxes}{view}</worldbody></mujoco>"
    for drawing in drawing_of(xml):
        one, two, three, four = drawing.target.texture[:4]
        assert one == three and len({one, two, four}) == 3
        frame = np.empty((SIZE, SIZE, 3), np.uint8)
        drawing.canvas.draw(drawing.data, drawing.model.camera("front").id, frame)
        red, green = frame[:, :, 0] > 60, frame[:, :, 1] > 60
        assert red.sum() > 2.5 * green.sum() > 0 and not (red & green).any()


@pytest.mark.parametrize("casts", [False, True])
def test_a_map_of_shadows_is_there_where_a_light_casts_some(casts: bool) -> None:
    for drawing in drawing_of(model_xml().replace('castshadow="false"', f'castshadow="{str(casts).lower()}"')):
        assert bool(drawing.target.shadowFBO) == casts
        assert drawing.model.vis.quality.shadowsize > 0
