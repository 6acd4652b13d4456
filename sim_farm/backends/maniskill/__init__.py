"""`maniskill/<task>`: tabletop tasks of ManiSkill 3 (Tao et al. 2024, arXiv:2410.00425).

    tasks.py      which tasks there are, with their instructions; imports nothing
    simulator.py  resets and steps a task, draws its scenes: physics and renderer
    rendering.py  the device that draws, and a shader that draws faster
    culling.py    in software, only the triangles that can reach a pixel are drawn
    speed.py      less Python around the same PhysX calls
    two_cubes.py  a task class of this project's own: scene, cameras, reset, reward, success

Reward, cameras and reset of the other tasks are in the `mani_skill` package: subclass the task's class, as
`two_cubes.py` does.
"""
