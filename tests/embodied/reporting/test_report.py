"""The report: one file, complete, escaped, and of use even where files are missing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from embodied.reporting import charts
from embodied.reporting.report import VIDEO_BYTES, ReportError, write_report
from embodied.run.trace import COMPONENTS
from tests.embodied.reporting.synthetic import EVALUATION, write_run

VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what the tests ask about."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.sources: list[str] = []
        self.points: list[list[list[object]]] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(html)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        sources = [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.sources += [source for source in sources if source != "data:,"]  # no icon, which else is asked for
        if data := values.get("data-points"):
            self.points.append(json.loads(data))
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def says(self, text: str) -> bool:
        return text in " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "tabletop_reach")


@pytest.fixture(scope="module")
def html(run_dir: Path) -> str:
    return write_report(run_dir).read_text()


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def without(run_dir: Path, tmp_path: Path, *names: str) -> Path:
    """A copy of the run in which these files are missing."""
    for file in run_dir.rglob("*"):
        if file.is_file() and not any(part in names for part in file.relative_to(run_dir).parts):
            copy = tmp_path / "run" / file.relative_to(run_dir)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return tmp_path / "run"


def test_the_page_is_self_contained(html: str, page: Page) -> None:
    assert page.sources and all(source.startswith("data:") for source in page.sources)
    assert not re.search(r"""(src|href|url\(|import|fetch)\s*[=(]?\s*["']?\s*(https?:)?//""", html)
    assert "default-src 'none'" in html


def test_text_from_files_is_escaped(html: str, page: Page) -> None:
    assert page.tags.count("script") == 1
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html
    assert page.says("tabletop/reach <b>") and "<td>tabletop/reach &lt;b&gt;</td>" in html


def test_the_key_figures_are_those_of_the_files(page: Page) -> None:
    assert page.says("94.5%") and page.says("90.4% to 96.9%, 200 episodes")
    assert page.says("164k") and page.says("40 iterations") and page.says("6 min 21 s")
    assert page.says("small_cnn") and page.says("2 CPU cores, no GPU")


def test_time_to_target_is_when_the_recent_episodes_first_reached_it(run_dir: Path, page: Page) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    reached = next(i for i, row in enumerate(rows) if row["env/success_recent"] >= 0.8)
    assert page.says(f"{charts.compact(rows[reached]['env_steps'])} env steps")
    assert page.says(f"Time to success 0.8 {int(rows[reached]['wall_s'] // 60)} min")


def test_every_value_of_the_curves_is_under_the_pointer(run_dir: Path, page: Page) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_steps, by_time, *others = page.points
    assert len(by_steps) == len(by_time) == 40
    for row, point in zip(rows, by_steps, strict=True):
        assert f"{row['env_steps']:,} env steps" in str(point[1])
        assert point[2] == f"this iteration {charts.exact(row['env/success_once'], charts.percent)}"
    texts = {text for chart in others for point in chart for text in point}
    for key in ("env/return", "learner/approx_kl", "learner/explained_variance", "farm/env_steps_per_s"):
        assert f"{key} {charts.exact(rows[20][key])}" in texts
    assert f"physics {charts.percent(rows[20]['time/physics'])}" in texts


def test_results_come_first_and_the_rest_after_the_curves(html: str) -> None:
    titles = re.findall("<h2>(.*?)</h2>", html)
    assert titles[:4] == ["Evaluation", "Videos", "Success", "Learner"]
    assert titles[-2:] == ["Configuration", "Protocol"]


def test_metrics_that_never_change_are_folded_and_missing_ones_explained(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", iterations=6)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    critic = ("learner/value_loss", "learner/explained_variance")
    rows = [{k: v for k, v in row.items() if k not in critic} | {"learner/ranks": 2.0} for row in rows]
    rows = [{**row, "learner/grad_norm": None} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = write_report(run).read_text()
    page = Page(html)
    assert page.says("1 metric that never changed") and "constant: <code>learner/ranks</code> = 2" in html
    assert not any("learner/ranks" in str(text) for chart in page.points for point in chart for text in point)
    assert page.says("learner/explained_variance , learner/value_loss : no values: this workflow has no critic.")
    assert page.says("learner/grad_norm : no values were recorded.")
    rows = [{**row, "learner/value_loss": 0.0} for row in rows]  # what a workflow without a critic records
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report(run).read_text())
    assert page.says("learner/explained_variance : no values: this workflow has no critic.")


def test_settings_that_are_defaults_are_folded(run_dir: Path, tmp_path: Path) -> None:
    run = without(run_dir, tmp_path, "metrics.jsonl", "trace.json")
    config = run / "config.yaml"
    config.write_text(config.read_text() + "seed: 0\niterations: 100\n")
    html = write_report(run).read_text()
    own, folded = html[html.index("<h2>Configuration") :].split("<details", 1)
    assert "<code>env.task</code></td><td>tabletop/reach</td><td>maniskill/PushCube-v1</td>" in own
    assert "<code>env.image_size</code></td><td>64</td><td>128</td>" in own
    assert "<code>ppo.gamma</code></td><td>0.99</td><td>–</td>" in own, "a setting that there is no more"
    assert "<code>seed</code>" not in own and "<code>seed</code></td><td>0</td><td>default</td>" in folded
    assert "2 settings with the default value" in folded


def test_the_timeline_shows_the_last_complete_iteration_by_worker(html: str, page: Page) -> None:
    assert page.says("Iteration 38, ")
    timelines = re.findall(r'<svg class="timeline".*?</svg>', html)
    assert len(timelines) == 2  # the whole, and a stretch in which arrows can be told apart
    for track in ("physics 0", "physics 1", "render 0", "policy", "learner", "driver"):
        assert f">{track}</text>" in timelines[0]
    for component in ("physics", "render", "policy", "learner"):
        assert timelines[0].count(f'fill="{COMPONENTS[component]}"') >= 4
    assert 'class="flow"' in timelines[1]


def test_the_charts_follow_the_pages_colours_and_their_text_is_text(html: str, page: Page) -> None:
    drawn = re.findall(r'<svg class="chart".*?</svg>', html, re.DOTALL)
    assert len(drawn) == 13 and page.says("100k") and page.says("wall-clock, min")
    for chart in drawn:
        assert "var(--muted)" in chart and not re.search("#0000(?!00)", chart)
        width = float(re.findall(r'viewBox="0 0 (\d+)', chart)[0])
        # A phone shows a chart about 330 pixels wide: text of 11.5 must not shrink to less than 9.
        assert 11.5 * 330 / width >= 9
        (points,) = Page(chart).points
        assert all(0 <= float(str(point[0])) <= width for point in points)
    everywhere = {name for chart in drawn for name in re.findall(r'xlink:href="(.)', chart)}
    assert everywhere == {"#"}, "a chart refers to something outside of the page"


@pytest.mark.parametrize("values", [[1.2500, 1.2504], [1e6, 1e6 + 3], [0.1, 0.9]])
def test_no_two_ticks_have_the_same_label(values: list[float]) -> None:
    drawn = charts.lines([1, 2], [charts.Line("a", values)], "env steps", ["", ""])
    labels = re.findall(r"<text[^>]*text-anchor: end[^>]*>([^<]*)</text>", drawn)
    assert len(labels) >= 3 and len(set(labels)) == len(labels), labels


def test_drawing_again_gives_the_same_chart() -> None:
    first, second = (
        charts.lines([1, 2, 3], [charts.Line("a", [1.0, None, 3.0])], "env steps", [""] * 3) for _ in range(2)
    )
    assert first == second


def test_videos_are_embedded_until_they_are_too_large(run_dir: Path, tmp_path: Path) -> None:
    run = without(run_dir, tmp_path)
    (run / "videos" / "second one.mp4").write_bytes(bytes(VIDEO_BYTES))
    first, second = Page(write_report(run).read_text()).sources
    assert first.startswith("data:video/mp4;base64,")
    assert second == "videos/second%20one.mp4"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("metrics.jsonl", "no iteration has ended"),
        ("trace.json", "embodied train CONFIG"),
        ("eval.json", "embodied eval runs/run"),
        ("videos", "embodied eval runs/run"),
        ("config.yaml", "embodied train CONFIG"),
    ],
)
def test_a_missing_file_costs_only_its_section(run_dir: Path, tmp_path: Path, name: str, command: str) -> None:
    page = Page(write_report(without(run_dir, tmp_path, name)).read_text())
    assert page.says(command)
    assert page.says("Protocol")


@pytest.mark.parametrize("name", ["metrics.jsonl", "trace.json", "eval.json", "config.yaml"])
@pytest.mark.parametrize("content", ["{<b>\n", "[1, 2]\n", '{"episodes": "<i>"}\n', "\xff\n", "NaN\n"])
def test_a_damaged_file_is_reported_and_not_fatal(run_dir: Path, tmp_path: Path, name: str, content: str) -> None:
    run = without(run_dir, tmp_path, *({"metrics.jsonl"} - {name}))  # no curves, whose drawing takes the time
    (run / name).write_bytes(content.encode("latin-1"))
    html = write_report(run).read_text()
    Page(html)
    assert "<b>\n" not in html and "<i>" not in html


def line(**values: float) -> str:
    return json.dumps({"iteration": 1, "env_steps": 10, "wall_s": 1.0, "env/success_once": 0.5, **values}) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("metrics.jsonl", line(**{"env/success_once": 1.7, "env/episodes": 8}), "170%"),
        ("metrics.jsonl", line(**{"learner/policy_loss": 10**30}), "learner/policy_loss"),
        ("metrics.jsonl", line(**{"learner/policy_loss": 1e300}), "Success in training"),
        ("metrics.jsonl", line(env_steps=10**20), "is not a row of metrics"),
        ("eval.json", "[]", "eval.json has no task"),
        ("eval.json", json.dumps({"episodes": 4, "success_rate": 1.5}), "a success rate of 1.5"),
        ("eval.json", json.dumps({"episodes": 4, "success_rate": 0.5, "task": "a\ud800b"}), "a\\ud800b"),
        ("config.yaml", "stop_at: 1.0e+300\n", "Time to success 0.9"),
        ("config.yaml", "a: &a [*a]\n", "config.yaml cannot be read"),
        ("trace.json", "[" * 100_000, "trace.json is not a trace"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_cannot_be_is_reported_or_left_out(name: str, content: str, says: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    files = {"metrics.jsonl": line(), name: content}
    for file, text in files.items():
        (run / file).write_text(text)
    text = write_report(run).read_text()
    assert says in " ".join(Page(text).text), " ".join(Page(text).text)


def test_without_an_evaluation_the_training_success_has_an_interval(run_dir: Path, tmp_path: Path) -> None:
    page = Page(write_report(without(run_dir, tmp_path, "eval.json")).read_text())
    assert page.says("Success in training")
    assert re.search(r"[\d.]+% to [\d.]+%, mean of the last 5 iterations", " ".join(page.text))


def test_a_run_that_did_not_reach_its_target_says_how_far_it_came(tmp_path: Path) -> None:
    page = Page(write_report(write_run(tmp_path / "run", iterations=12)).read_text())
    assert page.says("not reached")


def test_several_evaluations_are_rows_of_one_table(run_dir: Path, tmp_path: Path) -> None:
    run = without(run_dir, tmp_path)
    others = [{**EVALUATION, "task": f"task {n}", "success_rate": n / 10, "episodes": 100} for n in (2, 8)]
    (run / "eval.json").write_text(json.dumps(others))
    page = Page(write_report(run).read_text())
    assert page.says("task 2") and page.says("task 8")
    assert page.says("50%") and page.says("43.1% to 56.9%, 200 episodes")


@pytest.mark.parametrize(
    ("trained", "known", "css"), [(0, True, "note"), (7, True, "notice"), (0, False, "notice")], ids=str
)
def test_only_what_is_to_be_minded_stands_in_a_box_of_warning(
    trained: int, known: bool, css: str, run_dir: Path, tmp_path: Path
) -> None:
    run = without(run_dir, tmp_path, "metrics.jsonl", "trace.json")
    starts = {"trained": trained, "evaluated": 100, "known": known}
    notes = ["what is said of the starts", "the statistics are of another suite"]
    (run / "eval.json").write_text(json.dumps({**EVALUATION, "trained_on": starts, "notes": notes}))
    html = write_report(run).read_text()
    assert f'<p class="{css}">{notes[0]}.</p>' in html and f'<p class="notice">{notes[1]}.</p>' in html


def other_file(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("nothing")


@pytest.mark.parametrize("make", [other_file, Path.mkdir, Path.touch, lambda path: None])
def test_what_is_no_run_is_refused_with_advice(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "somewhere")
    with pytest.raises(ReportError, match=r"somewhere is not a .*embodied train CONFIG"):
        write_report(tmp_path / "somewhere")
    assert not (tmp_path / "somewhere" / "report.html").exists()


def test_writing_again_replaces_the_page(run_dir: Path) -> None:
    before = sorted(file.name for file in run_dir.iterdir())
    write_report(run_dir)
    assert sorted({*before, "report.html"}) == sorted(file.name for file in run_dir.iterdir())


@pytest.mark.parametrize("low, high", [(0, 1), (-3, 7), (1e-5, 3e-5), (40, 41), (0, 123_456)])
def test_ticks_are_round_and_within_the_range(low: float, high: float) -> None:
    found = charts.ticks(low, high, about=5)
    assert 3 <= len(found) <= 9
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    assert all(float(f"{tick:.3g}") == pytest.approx(tick) for tick in found)


@pytest.mark.parametrize("values", [[1.0, 1.0], [0.0], [None, None], [None, 2.0, None]])
def test_curves_without_a_range_are_drawn(values: list[float | None]) -> None:
    drawn = charts.lines(range(len(values)), [charts.Line("a", values)], "env steps", [""] * len(values))
    assert "nan" not in drawn and "inf" not in drawn


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.2e-4, "1.2e-4"), (1e-5, "1e-5"), (0.98765, "0.988"), (1234, "1,234"), (-0.5, "-0.5")]
    + [(49_152, "49.2k"), (1_234_567, "1.23M"), (2e9, "2G"), (999_999, "1M")],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert charts.compact(value) == text


def test_the_trailing_mean_never_looks_ahead() -> None:
    assert charts.trailing_mean([None, 1.0, None, 3.0, 5.0, 7.0], 3) == [None, 1.0, 1.0, 2.0, 3.0, 5.0]
    assert charts.trailing_mean([1.0, 2.0], 1) == [1.0, 2.0]
    assert math.isclose(charts.trailing_mean([0.1] * 9, 5)[-1] or 0, 0.1)
