"""The report's charts: their curves and points."""

from pathlib import Path
from typing import Any

from phalanx.run.telemetry.curves import Points
from phalanx.run.telemetry.run_folder import Run
from phalanx.tools.board.charts import COLOURS, charts_of, thin
from tests.helpers.pages import curves_of


def of_rows(*rows: dict[str, Any], label: str = "") -> Run:
    return Run(Path("run"), label, curves_of(*rows), None, {})


class TestCharts:
    def test_no_value_that_is_no_number_is_drawn(self) -> None:
        values = [0.5, None, float("nan"), float("inf"), "text", 0.25]
        rows = [{"step": step, "reward/mean": value} for step, value in enumerate(values)]
        (chart,), others = charts_of([of_rows(*rows)])
        assert chart.series[0].points == [(0, 0.5), (5, 0.25)]
        assert others == []

    def test_the_band_belongs_to_its_points(self) -> None:
        rows = [{"step": 0, "reward/mean": 1.0, "reward/std": 0.5}, {"step": 1, "reward/mean": 2.0}]
        (chart,), _ = charts_of([of_rows(*rows)])
        data = chart.data()["series"][0]
        assert (data["y"], data["band"]) == ([1.0, 2.0], [0.5, 0.0])
        assert "The band is one standard deviation." in chart.html()

    def test_validations_have_intervals_of_their_sets(self) -> None:
        row = {"val/a/reward/mean": 1.0, "val/a/reward/ci95": 0.1, "val/b/reward/mean": 2.0, "val/b/reward/ci95": 0.2}
        row["val/a/reward/ci95_low"] = 0.8  # the mean is not in the middle
        (chart,), others = charts_of([of_rows({"step": 0, **row})])
        assert others == []
        bands = [(series["label"], series["y"], series["band"]) for series in chart.data()["series"]]
        assert bands == [("a", [1.0], [0.1]), ("b", [2.0], [0.2])]
        assert [series.get("low") for series in chart.data()["series"]] == [[0.8], None]
        assert "The band is a 95 % interval of the mean over such prompts." in chart.html()

    def test_curves_of_several_runs_have_no_band_and_differ_in_colour_and_dash(self) -> None:
        row = {"step": 0, "reward/mean": 1.0, "reward/std": 0.5, "actor/clipfrac": 0.1, "actor/clipfrac_lower": 0.2}
        (reward, clip), _ = charts_of([of_rows(row, label="a"), of_rows(row, label="b")])
        assert all("band" not in series for series in reward.data()["series"])
        assert "The band" not in reward.html()
        assert [(s.label, s.colour, s.dash) for s in clip.series] == [
            ("a · actor/clipfrac", 0, 0),
            ("b · actor/clipfrac", 1, 1),
            ("a · actor/clipfrac_lower", 2, 0),
            ("b · actor/clipfrac_lower", 3, 1),
        ]

    def test_no_two_curves_of_a_chart_look_the_same(self) -> None:
        row = {f"reward/term_{k}": float(k) for k in range(11)}
        for labels in ([""], ["a", "b"]):
            (chart,), _ = charts_of([of_rows({"step": 1, **row}, label=label) for label in labels])
            looks = {(series.colour % COLOURS, series.dash % 4) for series in chart.series}
            assert len(looks) == len(chart.series) == 11 * len(labels)

    def test_phases_stand_in_their_order_with_all_steps(self) -> None:
        rows = [
            {"step": 0, "time/validation": 2.0},
            {"step": 1, "time/odd": 1.0, "time/update": 3.0, "time/rollout": 4.0},
        ]
        (chart,), others = charts_of([of_rows(*rows)])
        assert others == []
        assert [(series.label, series.points) for series in chart.series] == [
            ("rollout", [(0, 0.0), (1, 4.0)]),
            ("update", [(0, 0.0), (1, 3.0)]),
            ("validation", [(0, 2.0), (1, 0.0)]),
            ("odd", [(0, 0.0), (1, 1.0)]),
        ]
        assert chart.data()["bars"] is True

    def test_policies_of_a_joint_run_share_charts(self) -> None:
        """The writer's curves and phases precede the painter's, and each curve has its own band."""
        row = {"reward/mean": 1, "reward/std": 2, "painter/actor/grad_norm": 1, "writer/actor/grad_norm": 1}
        row |= {"writer/reward/mean": 3, "writer/reward/std": 4, "writer/rewrite/cut_ratio": 0.5, "writer/odd": 1}
        row |= {f"time/{name}": 1 for name in ("painter_rollout", "painter_update", "writer_rollout", "writer_update")}
        known, others = charts_of([of_rows({"step": 1, **row})])
        labels = {chart.title: [series.label for series in chart.series] for chart in known}
        assert labels == {
            "Training reward": ["reward/mean", "writer/reward/mean"],
            "Rewritten prompts": ["writer/cut_ratio"],
            "Gradient norm": ["writer/actor/grad_norm", "painter/actor/grad_norm"],
            "Seconds by phase": ["writer_rollout", "painter_rollout", "writer_update", "painter_update"],
        }
        assert [series.band for series in known[0].series] == [[(1, 2)], [(1, 4)]]
        assert [chart.title for chart in others] == ["writer/odd"]

    def test_each_metric_is_in_a_chart(self) -> None:
        row = {
            "reward/mean": 1,
            "reward/std": 1,
            "reward/max": 1,
            "reward/a": 1,
            "val/x/reward/mean": 1,
            "val/x/len": 1,
        }
        known, others = charts_of([of_rows({"step": 1, **row})])
        assert [chart.title for chart in known] == ["Training reward", "Validation reward", "Reward terms"]
        assert [(chart.title, chart.plain) for chart in others] == [("reward/max", False), ("val/x/len", True)]

    def test_thin_keeps_means_and_the_number_of_points(self) -> None:
        assert thin(Points(range(40), [k % 2 for k in range(40)]), 10) == [(4 * k + 2, 0.5) for k in range(10)]
        assert thin(Points([1, 7], [2.0, 3.0]), 2) == [(1, 2.0), (7, 3.0)]
        assert thin(Points(), 5) == []
        sizes = [len(thin(Points(range(n), [1.0] * n), 10)) for n in (9, 10, 11, 19, 101)]
        assert sizes == [9, 10, 10, 10, 10]
        assert thin(Points(range(4), [1.7e308] * 4), 2) == [(1, 1.7e308), (3, 1.7e308)]  # the sum is too large
