"""The display of a run, while it lasts and afterwards. The modules do not need each other, so that a worker
that records spans does not import what draws a page.

| module | what a person gets |
|---|---|
| `live` | a table that moves while the run does; plain lines where there is no terminal |
| `metrics` | `metrics.jsonl` and TensorBoard: one row per iteration |
| `trace` | `trace.json`, which ui.perfetto.dev opens: a track per worker, arrows from observation to action |
| `video` | evaluation episodes side by side in one mp4 |
| `report` | all of it on one self-contained HTML page, `report.html`, filled by `charts` and `timeline` |
"""
