"""ManiSkill's tasks that are served without a module of the user's, without importing ManiSkill."""

from __future__ import annotations

INSTRUCTIONS = {
    "DrawSVG-v1": "draw the outlined shape on the canvas",
    "DrawTriangle-v1": "draw the outlined triangle on the canvas",
    "LiftPegUpright-v1": "lift the peg and stand it upright",
    "PegInsertionSide-v1": "insert the peg into the hole of the box",
    "PickCube-v1": "pick up the cube and hold it at the goal",
    "PickCubeSO100-v1": "pick up the cube and hold it at the goal",
    "PlaceSphere-v1": "pick up the sphere and place it in the bin",
    "PlugCharger-v1": "plug the charger into the receptacle",
    "PokeCube-v1": "poke the cube to the goal with the peg",
    "PullCube-v1": "pull the cube to the goal",
    "PullCubeTool-v1": "pull the cube closer with the tool",
    "PushCube-v1": "push the cube to the goal",
    "PushGreenCube-v1": "push the green cube to the goal",
    "PushRedCube-v1": "push the red cube to the goal",
    "PushT-v1": "push the T onto its outline",
    "RollBall-v1": "roll the ball to the goal",
    "StackCube-v1": "stack the red cube on the green cube",
    "StackPyramid-v1": "build a pyramid of the three cubes",
    "TwoRobotPickCube-v1": "hand the cube over and hold it at the goal",
    "TwoRobotStackCube-v1": "place one cube on the goal and stack the other on it",
}
"""The tabletop tasks that run on the CPU and need no download, with what the robot is told to do."""
