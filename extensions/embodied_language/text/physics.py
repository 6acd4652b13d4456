"""Steps one text task: an action is a token, and the verifier's score is the last one's reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from embodied_language.text.problems import TextTask
from embodied_language.text.tokenizer import answer_tokenizer
from embodied_language.text.verifying import score
from sim_farm.contract import Backend, EpisodeOver, EpisodeSpec, FarmError, Float32, PhysicsResult, TaskInfo, TaskSpec

TOKENS = "tokens"
"""The control mode."""
NO_TOKEN = -1.0
"""Number of the state where the answer has no token yet."""
TOKENS_PER_SECOND = 30.0
"""Control rate of a text task, which has no clock: it scales pages' time axes alone."""


def text_backend(name: str, tasks: Callable[[], Mapping[str, TextTask]]) -> Backend:
    """The backend of these tasks, by their names: our own `text`, or one of yours in a module of your own."""
    return Backend(
        name,
        lambda spec: TextPhysics(spec, tasks()[spec.name.partition("/")[2]]),
        None,
        tasks=lambda: list(tasks()),
        rewards=("sparse",),
        files=lambda task: tasks()[task.partition("/")[2]].files,
        quick=True,
        packages=("tokenizers",),
        distinct_seeds=False,
        options=("tokenizer",),
    )


class TextPhysics:
    """One problem after the other. The state [L] is the token ids after the problem so far, -1 where there is none yet.

    An end-of-sequence token ends the answer, and the episode; the verifier scores the text before it, and a score of 1
    is success. In a task of several turns a wrong answer ends a turn, is worth nothing unless it is the last, and is
    replied to: the reply's tokens follow it in the state, and are no env steps. An answer that is cut off at the limit
    is worth nothing. A number that is no token's id is the nearest one. There is no proprioception. A verifier that
    fails makes the reward NaN, an episode that the farm counts as broken, and the result's fault says how it failed.
    """

    def __init__(self, spec: TaskSpec, task: TextTask) -> None:
        """Raises `FarmError` for cameras, a control mode, or a task without a tokenizer."""
        if spec.cameras:
            raise FarmError(f"{spec.name} is text and has no cameras: set env.cameras to 0")
        if spec.control_mode not in (None, TOKENS):
            raise FarmError(f"{spec.name} has no control mode {spec.control_mode!r}; valid: {TOKENS}")
        folder = spec.options.get("tokenizer")
        if not isinstance(folder, str):
            raise FarmError(
                f"{spec.name} is answered in tokens: set env.options.tokenizer to the folder of the language model "
                "that answers"
            )
        self._task, self._tokenizer = task, answer_tokenizer(folder)
        limit = spec.max_episode_steps or task.answer_tokens
        self.info = TaskInfo(
            spec=replace(spec, control_mode=TOKENS, max_episode_steps=limit, cameras=()),
            action_dim=1,
            action_low=(0.0,),
            action_high=(float(self._tokenizer.size - 1),),
            proprio_dim=0,
            state_dim=max(limit, task.answer_tokens) + (task.turns - 1) * task.reply_tokens,
            scene_bytes=0,
            cameras=(),
            max_episode_steps=limit,
            control_hz=TOKENS_PER_SECOND,
            discrete_actions=self._tokenizer.size,
            instruction_bytes=task.prompt_bytes,
            turns=task.turns,
            digest=None if task.files is None else task.files.digest,
        )
        self._problem = task.problem(0)
        self._said: list[int] = []
        """Tokens after the problem: answers and replies."""
        self._turn = self._turn_begin = self._steps = 0
        """Number of the turn, where it begins in `_said`, and env steps so far."""
        self._answered = self._solved = False
        self._under_way = False
        self._fault = ""

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        self._problem = self._task.problem(episode.seed)
        stated = len(self._problem.text.encode())
        if stated > self._task.prompt_bytes:
            raise FarmError(
                f"{self.info.spec.name}: the problem of seed {episode.seed} has {stated} bytes, and its "
                f"TextTask.prompt_bytes is {self._task.prompt_bytes}: set that to the longest problem's"
            )
        self._fault = ""
        self._said, self._turn, self._turn_begin, self._steps = [], 0, 0, 0
        self._answered, self._solved, self._under_way = False, False, True
        return self._result([], [], (False, False))

    def step(self, actions: Float32) -> PhysicsResult:
        if not self._under_way:
            raise EpisodeOver(f"the episode of {self.info.spec.name} is over or never began: call reset")
        rewards: list[float] = []
        solved: list[bool] = []
        terminated, turn = False, self._turn
        room = self.info.max_episode_steps - self._steps
        for token in np.clip(np.rint(actions[:room, 0]), 0, self._tokenizer.size - 1).astype(np.int64).tolist():
            rewards.append(self._take(token))
            solved.append(self._solved)
            terminated = self._answered and not self.info.spec.ignore_terminations
            if terminated or self._turn > turn:
                break
        cut_off = not terminated and self._steps == self.info.max_episode_steps
        self._under_way = not (terminated or cut_off)
        return self._result(rewards, solved, (terminated, cut_off))

    def close(self) -> None:
        self._under_way = False

    def _take(self, token: int) -> float:
        """The reward of one more token. What follows the end of the last answer changes nothing."""
        self._said.append(token)
        self._steps += 1
        if self._answered or token not in self._tokenizer.ends:
            return 0.0
        answer = self._tokenizer.text(self._said[self._turn_begin : -1])
        found = score(self._problem, answer)
        self._solved, self._fault = found.value == 1.0, found.fault
        self._answered = self._solved or bool(found.fault) or self._turn == self._task.turns - 1
        if self._answered:
            return found.value
        self._said += self._tokenizer.ids(self._problem.reply(answer))[: self._task.reply_tokens]
        self._turn, self._turn_begin = self._turn + 1, len(self._said)
        return 0.0

    def _result(self, rewards: list[float], solved: list[bool], ends: tuple[bool, bool]) -> PhysicsResult:
        flags = np.zeros((2, len(rewards)), np.bool_)
        if rewards:
            flags[:, -1] = ends
        state = np.full(self.info.state_dim, NO_TOKEN, np.float32)
        state[: len(self._said)] = self._said
        return PhysicsResult(
            reward=np.array(rewards, np.float32),
            success=np.array(solved, np.bool_),
            terminated=flags[0],
            truncated=flags[1],
            proprio=np.zeros(0, np.float32),
            state=state,
            scene=np.zeros(0, np.uint8),
            instruction=self._problem.text,
            fault=self._fault,
        )
