"""The farm as a `gymnasium.vector.VectorEnv`, for any library that takes one.

    envs = sim_farm.vector_env("maniskill/PushCube-v1", 16, workers=2)
    observations, infos = envs.reset(seed=0)
    observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

Its results are, bit for bit, those of `gymnasium.vector.SyncVectorEnv` over single environments with the same physics.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ModuleNotFoundError as error:
    from sim_farm.contract import FarmError

    raise FarmError(
        "sim_farm.vector_env needs the package 'gymnasium': pip install 'embodied-farm[gymnasium]'"
    ) from error

from sim_farm.catalogue import check_task
from sim_farm.client.farm import Farm
from sim_farm.client.observations import Int, Observations
from sim_farm.client.task_farm import check_spec
from sim_farm.contract import Bool, FarmError, TaskInfo, TaskSpec
from sim_farm.conventions import MAX_SEED
from sim_farm.episodes import SeededEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.processes import Processes

Shown = Literal["state", "proprio", "frames"]
Batch = Any
"""Observations of B environments: an array [B, ...], or a dict of such arrays where frames are observed."""
DEADLINE_S = 300.0
"""Longest time without progress of a worker, after which a step or a reset gives up; a worker is replaced after half of
it."""


def vector_env(
    task: str,
    num_envs: int,
    *,
    workers: int | None = None,
    observations: Shown = "state",
    cameras: int | tuple[str, ...] = 0,
    image_size: int = 128,
    control_mode: str | None = None,
    reward: Literal["dense", "sparse"] | None = None,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
) -> FarmVectorEnv:
    """Environments of one task in worker processes, started here, without Ray.

    `workers` must divide `num_envs`; None is the largest such number up to the number of cores. `observations` is what
    a step shows: `state` (the simulator's full observation) or `proprio` (what the robot feels), float32 vectors. With
    `cameras`, it is a dict of that and each camera's uint8 frames [`image_size`, `image_size`, 3]; `frames` leaves the
    vector out. The other arguments are `TaskSpec`'s, and Gymnasium's `autoreset_mode`.

    Raises `FarmError`.
    """
    check_task(task)
    if observations not in get_args(Shown):
        raise FarmError(f"observations is one of {', '.join(get_args(Shown))}, got {observations!r}")
    if observations == "frames" and not cameras:
        raise FarmError("observations='frames' needs cameras: give cameras=1, or the names of some")
    try:
        mode = AutoresetMode(autoreset_mode)
    except ValueError:
        valid = ", ".join(repr(each.value) for each in AutoresetMode)
        raise FarmError(f"autoreset_mode is one of {valid}, got {autoreset_mode!r}") from None
    spec = TaskSpec(
        task,
        control_mode=control_mode,
        reward=reward,
        max_episode_steps=max_episode_steps,
        ignore_terminations=ignore_terminations,
        cameras=cameras,
        image_size=image_size,
    )
    processes = _most_workers(num_envs) if workers is None else workers
    farm_spec = FarmSpec(spec, SeededEpisodes(), num_envs, physics_workers=processes, final_frames="ended")
    check_spec(farm_spec)
    host = Processes(DEADLINE_S, DEADLINE_S / 2)
    try:
        farm = Farm.create(farm_spec, host)
        _check_shown(farm.infos[0], observations)
        return FarmVectorEnv(farm, host, observations, mode)
    except BaseException:
        host.close()
        raise


def _check_shown(info: TaskInfo, shown: Shown) -> None:
    """Raise `FarmError` where the task has nothing of what each step is to show."""
    sizes = {"state": info.state_dim, "proprio": info.proprio_dim}
    if sizes.get(shown, 1):
        return
    others = [name for name, size in sizes.items() if size]
    remedy = f"give observations={others[0]!r}" if others else "give observations='frames' and cameras=1 or more"
    raise FarmError(f"{info.spec.name} has no {shown}: {remedy}")


def _most_workers(num_envs: int) -> int:
    """The largest number of workers, up to that of this process's cores, among which the environments can be dealt."""
    cores = len(os.sched_getaffinity(0))
    return max((count for count in range(1, cores + 1) if num_envs % count == 0), default=1)


class FarmVectorEnv(VectorEnv[Batch, np.ndarray, np.ndarray]):
    """Made by `vector_env`. `metadata["autoreset_mode"]` says what happens after an episode's end.

    `infos` of a step have, each with Gymnasium's mask `_KEY`: `success` (the task is solved after this step),
    `instruction`, `broken` (only where the simulator returned numbers that are not finite: the episode ends as
    terminated, with reward 0 and zeros for its last observation), and in `SAME_STEP` `final_obs` and `final_info`.
    """

    def __init__(self, farm: Farm, host: Processes, shown: Shown, mode: AutoresetMode) -> None:
        """The environments of `farm`, which has one group and is closed with this."""
        info: TaskInfo = farm.infos[0]
        self.num_envs, self.task_info = farm.specs[0].num_envs, info
        self.metadata = {"autoreset_mode": mode, "render_modes": []}
        self.single_observation_space = _observation_space(info, shown)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.single_action_space = _action_space(info)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._farm, self._host, self._shown, self._mode = farm, host, shown, mode
        self._streams = [np.random.default_rng() for _ in range(self.num_envs)]
        """Each environment's generator, from which the seeds of its episodes come."""
        self._next_seeds: Int = np.array([stream.integers(MAX_SEED + 1) for stream in self._streams])
        """[B] the seed of each environment's next episode."""
        self._ended: Bool = np.zeros(self.num_envs, np.bool_)
        """[B] environments whose last step ended their episode, before they begin another."""
        self._begun: Bool | None = None
        """[B] environments that began an episode at the last reset or step; None before the first reset."""
        # Also when this is collected as garbage, and at the interpreter's end.
        self._end = weakref.finalize(self, _close, farm, host)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._host.pids()

    # --- Gymnasium's calls

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Batch, dict[str, Any]]:
        """Begin an episode in every environment, or in those where `options["reset_mask"]` bool [B] is true.

        Environment i's episode has the seed `seed + i`, or `seed[i]`, and its later ones have seeds that its own
        generator draws, which starts from that seed. Without a seed, the generators continue. Raises `FarmError`.
        """
        self._check_open()
        which = self._reset_mask(options)
        seeds = self._seeds(seed)
        if self._begun is None and not which.all():
            raise FarmError("reset all environments before you reset some of them: leave options['reset_mask'] out")
        for i in np.flatnonzero(which).tolist():
            given = seeds[i]
            if given is not None:
                self._streams[i], self._next_seeds[i] = np.random.default_rng(given), given
        self._farm.begin(0, which, self._take_seeds(which))
        seen = self._collect()
        self._begun, self._ended = which, self._ended & ~which
        return self._observed(seen), _masked(which, instruction=_objects(seen.instruction, which))

    def step(self, actions: np.ndarray) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute `actions` [B, A], or choices [B] where they are discrete. Raises `FarmError`; where a worker failed,
        everything is closed then."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step, which `step_wait` ends. Raises `FarmError`."""
        self._check_open()
        chunks = self._chunks(actions)
        if self._begun is None:
            raise FarmError("reset the environments before their first step")
        if self._mode is AutoresetMode.DISABLED and self._ended.any():
            raise FarmError(
                f"the episodes of environments {np.flatnonzero(self._ended).tolist()} have ended: begin others with "
                "reset(options={'reset_mask': terminations | truncations}), or choose another autoreset_mode"
            )
        self._begun = np.zeros_like(self._ended)
        if self._mode is AutoresetMode.SAME_STEP:
            self._farm.submit(0, chunks, next_seeds=self._next_seeds)
        elif self._ended.any():
            self._begun = self._ended.copy()
            self._farm.begin(0, self._begun, self._take_seeds(self._begun), chunks)
        else:
            self._farm.submit(0, chunks)

    def step_wait(self) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Observations, rewards float64 [B], terminations and truncations bool [B], and infos of the step that has
        begun. Raises `FarmError`."""
        seen = self._collect()
        assert self._begun is not None
        rewards = seen.reward[:, 0].astype(np.float64)
        broken = np.isnan(rewards)
        rewards[broken] = 0.0
        self._ended = seen.terminated | seen.truncated
        infos = self._infos(seen, stepped=~self._begun, broken=broken)
        if self._mode is AutoresetMode.SAME_STEP:
            self._take_seeds(self._ended)
        return self._observed(seen), rewards, seen.terminated, seen.truncated, infos

    def close_extras(self, **kwargs: Any) -> None:
        """End the worker processes."""
        self._end()

    # --- what a step shows

    def _observed(self, seen: Observations) -> Batch:
        """The environments' present observations: after an episode's end, its last observation until another begins."""
        rows = _rows(self._shown, seen.state, seen.proprio, seen.frames)
        rests = ~seen.active[seen.final.rows]
        if rests.any():
            final = self._final_rows(seen)
            for key in rows:
                rows[key][seen.final.rows[rests]] = final[key][rests]
        return self._as_observation(rows)

    def _final_rows(self, seen: Observations) -> dict[str, np.ndarray]:
        final = seen.final
        rows = _rows(self._shown, final.state, final.proprio, final.frames)
        for camera in final.frames:
            rows[camera][~final.drawn] = 0
        return rows

    def _as_observation(self, rows: dict[str, Any]) -> Batch:
        return rows if self.task_info.cameras else rows[self._shown]

    def _infos(self, seen: Observations, stepped: Bool, broken: Bool) -> dict[str, Any]:
        """`stepped` [B]: environments that executed an action."""
        infos: dict[str, Any] = _masked(np.ones_like(stepped), instruction=np.array(seen.instruction, dtype=object))
        shown = stepped
        if self._mode is AutoresetMode.SAME_STEP and self._ended.any():
            # What an environment says of its last step is its final info; the episode that it has begun has said none.
            shown = ~self._ended
            final = self._final_rows(seen)
            objects = np.full(self.num_envs, None, dtype=object)
            for k, row in enumerate(seen.final.rows.tolist()):
                objects[row] = self._as_observation({key: values[k] for key, values in final.items()})
            texts = np.full(self.num_envs, None, dtype=object)
            texts[seen.final.rows] = seen.final.instruction
            infos["final_obs"] = objects
            infos["final_info"] = _masked(self._ended, success=seen.success[:, 0] & self._ended, instruction=texts)
            if broken.any():
                infos["final_info"] |= _masked(broken, broken=broken)
            infos |= {"_final_obs": self._ended.copy(), "_final_info": self._ended.copy()}
        elif broken.any():
            infos |= _masked(broken, broken=broken)
        if shown.any():
            infos |= _masked(shown, success=seen.success[:, 0] & shown)
        return infos

    # --- the farm

    def _collect(self) -> Observations:
        """Wait, replacing workers that are lost. After a failure everything is closed."""
        farm = self._farm
        try:
            farm.wait(self._done, lambda: farm.late(DEADLINE_S), DEADLINE_S, farm.progress_ns)
            return farm.collect(0)
        except BaseException:
            self.close()
            raise

    def _done(self) -> bool:
        if self._farm.ready():
            return True
        self._host.watch()
        return False

    def _take_seeds(self, which: Bool) -> Int:
        """[B] the seeds of the next episodes; those of `which` [B] are used, and the generators draw others."""
        seeds = self._next_seeds.copy()
        for i in np.flatnonzero(which).tolist():
            self._next_seeds[i] = self._streams[i].integers(MAX_SEED + 1)
        return seeds

    # --- what is given

    def _chunks(self, actions: np.ndarray) -> np.ndarray:
        """The actions, [B, A] or choices [B], as chunks of one, float32 [B, 1, A]."""
        try:
            given = np.asarray(actions, np.float64)
        except (TypeError, ValueError):
            raise FarmError(f"actions are numbers of shape {list(self.action_space.shape or ())}") from None
        if given.shape != self.action_space.shape:
            raise FarmError(f"actions have shape {list(self.action_space.shape or ())}, got {list(given.shape)}")
        if not np.isfinite(given).all():
            flat = given.reshape(self.num_envs, -1)
            env, place = np.argwhere(~np.isfinite(flat))[0].tolist()
            raise FarmError(f"actions are finite numbers: that of environment {env} has {flat[env, place]} at {place}")
        if self.task_info.discrete_actions:
            given = given - self.task_info.first_choice
            bad = (given != np.rint(given)) | (given < 0) | (given >= self.task_info.discrete_actions)
            if bad.any():
                env = int(bad.argmax())
                raise FarmError(
                    f"actions are choices of {self.single_action_space}: that of environment {env} is {actions[env]}"
                )
        return given.astype(np.float32).reshape(self.num_envs, 1, self.task_info.action_dim)

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        given: list[int | None] = (
            list(range(int(seed), int(seed) + self.num_envs)) if isinstance(seed, int | np.integer) else list(seed)
        )
        if len(given) != self.num_envs:
            raise FarmError(f"seed is one number or {self.num_envs}, one for each environment; got {len(given)}")
        if bad := [each for each in given if each is not None and not 0 <= each <= MAX_SEED]:
            raise FarmError(f"each environment's seed is a whole number from 0 to {MAX_SEED}, got {bad[0]}")
        return given

    def _reset_mask(self, options: Mapping[str, Any] | None) -> Bool:
        options = dict(options or {})
        mask = options.pop("reset_mask", np.ones(self.num_envs, np.bool_))
        if options:
            raise FarmError(f"reset knows the option reset_mask, got {', '.join(map(str, options))}")
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (self.num_envs,):
            raise FarmError(f"options['reset_mask'] is a bool array of shape [{self.num_envs}]")
        if not mask.any():
            raise FarmError("options['reset_mask'] names no environment")
        return mask.copy()

    def _check_open(self) -> None:
        if self.closed:
            raise FarmError("these environments are closed; make others with sim_farm.vector_env")


def _close(farm: Farm, host: Processes) -> None:
    farm.close()
    host.close()


def _action_space(info: TaskInfo) -> gymnasium.Space[Any]:
    if info.discrete_actions:
        return gymnasium.spaces.Discrete(info.discrete_actions, start=info.first_choice)
    low, high = (np.array(bound, np.float32) for bound in (info.action_low, info.action_high))
    return gymnasium.spaces.Box(low, high, dtype=np.float32)


def _observation_space(info: TaskInfo, shown: Shown) -> gymnasium.Space[Any]:
    spaces: dict[str, gymnasium.Space[Any]] = {}
    if shown != "frames":
        size = info.state_dim if shown == "state" else info.proprio_dim
        spaces[shown] = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
    if not info.cameras:
        return spaces[shown]
    side = info.spec.image_size
    for camera in info.cameras:
        spaces[camera] = gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8)
    return gymnasium.spaces.Dict(spaces)


def _rows(
    shown: Shown, state: np.ndarray, proprio: np.ndarray, frames: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The observations of each row, as arrays that belong to the caller."""
    rows = {} if shown == "frames" else {shown: state if shown == "state" else proprio}
    return rows | {camera: np.array(frames[camera]) for camera in frames}


def _objects(texts: Sequence[str], which: Bool) -> np.ndarray:
    """The texts [B] as objects, None where not `which`."""
    objects = np.array(texts, dtype=object)
    objects[~which] = None
    return objects


def _masked(mask: Bool, **values: np.ndarray) -> dict[str, np.ndarray]:
    """The values with Gymnasium's masks of the environments that they belong to."""
    return values | {f"_{key}": mask.copy() for key in values}
