"""The model card of a pushed policy: results, programs that load it, conventions, training, data, versions, licence."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied.commands.export import conventions, dequantised, loading, version
from embodied.config.schema import Config
from embodied.files import read_json, yaml_text
from embodied.hub import Name, is_repository
from embodied.reporting.tables import evaluation_table, table
from embodied.run.checkpoint import read_state
from embodied.training.sft import DATA
from embodied_hub.cards import card_text, licence_text
from embodied_hub.dataset_folder import fingerprint
from embodied_hub.record import TRAINING, USE
from embodied_hub.results import Beginning, Evaluation
from embodied_hub.settings import training_of

if TYPE_CHECKING:
    from embodied_hub.policy_folder import Pushed

TAGS = ("robotics", "embodied-farm")
PACKAGES = ("torch", "transformers", "peft", "huggingface-hub")
NOT_EVALUATED = "No evaluation of this checkpoint is recorded: nothing is said of how often it succeeds."


def card(
    pushed: Pushed, evaluations: Sequence[Evaluation], beginnings: Sequence[Beginning], licence: str | None
) -> str:
    """The text of README.md."""
    title = pushed.name.repository
    sections = {
        "Results": _results(evaluations, beginnings, pushed),
        "How it is loaded": _loaded(pushed),
        "Conventions": conventions(pushed.checkpoint).strip(),
        "Training": _training(pushed),
        "Data": _data(pushed),
        "Versions": _versions(evaluations),
        "Licence": licence_text(licence),
    }
    text = card_text(_front_matter(pushed, evaluations, licence), title, _about(pushed), sections)
    for place in (pushed.run_dir.resolve().parent, Path.cwd(), Path.home()):  # what notes name, without the way there
        if len(place.parts) > 1:  # the root is in every path, and in every address
            text = text.replace(f"{place}/", "")
    return text


def _front_matter(pushed: Pushed, evaluations: Sequence[Evaluation], licence: str | None) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    config = pushed.config
    base = pushed.base if pushed.base is not None and not pushed.base.startswith("assets/") else None
    learned = [Name.parse(str(one)) for one in config.sft.data if is_repository(str(one))]
    results = [
        EvalResult(
            task_type="robotics", task_name="robot policy", dataset_type="simulation", dataset_name=row["task"],
            metric_type="success_rate", metric_name="success once", metric_value=row["success_rate"],
            metric_args={"episodes": row["episodes"], "protocol_sha256": one.sha256},
        )
        for one in evaluations[:1] for row in one.result["tasks"] if row.get("success_rate") is not None
    ]  # fmt: skip
    data = ModelCardData(
        license=licence,
        library_name=pushed.loaded.library or "embodied-farm",
        pipeline_tag="robotics",
        tags=[*TAGS, pushed.policy.kind],
        base_model=base,
        datasets=[one.repository for one in learned if one is not None] or None,
        model_name=pushed.name.repository.partition("/")[2] if results else None,
        eval_results=results or None,
    )
    return str(data.to_yaml()).strip()


def _about(pushed: Pushed) -> str:
    state, env = read_state(pushed.checkpoint), pushed.config.env
    how = (
        "supervised learning from demonstrations" if state.stage == "sft" else f"{pushed.config.workflow} in simulation"
    )
    what = "A PEFT adapter" if pushed.is_adapter else "A policy"
    return (
        f"{what} (`{pushed.policy.kind}`) for {env.task}, trained by {how}: run `{pushed.run_dir.resolve().name}`, "
        f"checkpoint {pushed.checkpoint.name}, pushed with embodied-farm {version()}."
    )


def _results(evaluations: Sequence[Evaluation], beginnings: Sequence[Beginning], pushed: Pushed) -> str:
    if not evaluations:
        return NOT_EVALUATED
    parts = []
    for one in evaluations:
        before = [(each.name, each.evaluation) for each in beginnings if each.evaluation.sha256 == one.sha256]
        if before:
            rows = [_row(name, each) for name, each in (*before, ("this policy", one))]
            parts.append("\n".join(table(("on the same episodes", "success once %", "95% interval", "episodes"), rows)))
        parts.append(evaluation_table(without_folders(one.result, pushed)))
        parts.append(f"Protocol: sha256 `{one.sha256}`.")
    return "\n\n".join(part.strip() for part in parts)


def _row(name: str, evaluation: Evaluation) -> tuple[str, ...]:
    result = evaluation.result
    rate = result.get("success_rate")
    if rate is None:
        return name, "–", "–", str(result["episodes"])
    between = f"{100 * result['success_low']:.1f} to {100 * result['success_high']:.1f}"
    return name, f"{100 * rate:.1f}", between, str(result["episodes"])


def without_folders(result: Any, pushed: Pushed) -> dict[str, Any]:
    """The result with names in place of folders of this machine: the checkpoint's, and those that the policy is of."""
    line = str(result["policy_line"]).replace(str(result["checkpoint"]), pushed.checkpoint.name)
    for one in (result.get("files") or {}).values():
        line = line.replace(one["path"], Path(one["path"]).name)
    return {**result, "policy_line": line}


def _loaded(pushed: Pushed) -> str:
    name, form = pushed.name.repository, pushed.loaded
    beginning = f'from huggingface_hub import snapshot_download\n\nfolder = snapshot_download("{name}")'
    if pushed.is_adapter:
        beginning += f"\n{_base_line(pushed.base or '')}"
    own = pushed.name.repository.partition("/")[2]
    option = "adapter" if pushed.is_adapter else "checkpoint"
    commands = f"embodied pull {name} --out {own}\nembodied eval {own}/{USE} --policy.options.{option} {own}"
    text = (
        f"{loading(form, beginning)}\nEvaluated as it was here, by embodied-farm {version()}:\n\n```\n{commands}\n```"
    )
    if pushed.policy.base is not None:
        text += f"\n\nQuantised: {dequantised(pushed.policy.base)}."
    return text


def _base_line(base: str) -> str:
    if base.startswith("assets/"):
        return f'import embodied\nfrom pathlib import Path\n\nbase = Path(embodied.__file__).parent / "{base}"'
    return f'base = snapshot_download("{base}")'


def _training(pushed: Pushed) -> str:
    state, config = read_state(pushed.checkpoint), pushed.config
    verb = "sft" if state.stage == "sft" else "train"
    unit = "optimiser steps" if state.stage == "sft" else f"iterations, {state.env_steps:,} env steps"
    start = f" It began from {training_of(config)['policy']['init']}." if config.policy.init is not None else ""
    return (
        f"{state.iteration:,} {unit}, {state.wall_s / 60:.1f} minutes.{start} The settings that are not the defaults "
        f"are in `{TRAINING}`:\n\n```\nembodied {verb} {TRAINING}\n```\n\n```yaml\n{yaml_text(training_of(config))}```"
    )


def _data(pushed: Pushed) -> str:
    path = pushed.run_dir / DATA
    if not pushed.config.sft.data or not path.is_file():
        return _begun(pushed.config)
    rows = []
    for one in read_json(path)["datasets"]:
        mark = fingerprint(one["folder"], one["episodes"])
        solved = "not recorded" if one["solved"] is None else str(one["solved"])
        counts = (str(one["episodes"]), str(len(one["learned_from"])), solved)
        named = one["folder"] if is_repository(one["folder"]) else Path(one["folder"]).name
        rows.append((named, one["version"], *counts, mark))
    head = ("dataset", "version", "episodes", "learned from", "solved", "sha256 of the episodes")
    return "\n".join(table(head, rows))


def _begun(config: Config) -> str:
    if config.policy.init is not None:
        return "Episodes in simulation. What it began from may have learned from demonstrations."
    return "Episodes in simulation; no demonstrations."


def _versions(evaluations: Sequence[Evaluation]) -> str:
    found = [("embodied-farm", version()), ("Python", platform.python_version())]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    simulators = {text for one in evaluations for text in one.result["protocol"].get("simulators", {}).values() if text}
    found += [("simulator", text) for text in sorted(simulators)]
    return "\n".join(["At the push; of the simulator, at the evaluation.", "", *table(("package", "version"), found)])
