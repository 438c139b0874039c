"use strict";
// The curves of the report, drawn with uPlot, and its sliders. report.py writes the data: `charts` holds, for each
// .plot in the order of the page, what phalanx.tools.board.charts.Chart.data() says.
(() => {
  const COLOURS = 8;
  const DASHES = [[], [7, 4], [2, 4], [12, 4, 2, 4]];
  const HEIGHT = 220;
  const GHOST = 0.3; // opacity of what a smoothed curve was before

  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name).trim(); // at each drawing, as light and dark may change
  const colourOf = (series) => css(`--c${(series.colour % COLOURS) + 1}`);
  const figure = (value) => (value == null ? "–" : String(Number(value.toPrecision(5))));

  // Exponential moving average, corrected for its start, so that the first value is itself.
  function smoothed(values, weight) {
    let mean = 0;
    let seen = 0;
    return values.map((value) => {
      mean = weight * mean + (1 - weight) * value;
      seen = weight * seen + (1 - weight);
      return mean / seen;
    });
  }

  // --- curves ------------------------------------------------------------------------------------------------------

  // The columns of each curve: the curve, its band's lower and upper edge if it has one, and its ghost.
  function lineColumns(chart, weight) {
    return uPlot.join(
      chart.series.map((series) => {
        const smooth = (values) => (chart.plain ? values : smoothed(values, weight));
        const curve = smooth(series.y);
        const columns = [series.x, curve];
        if (series.band) {
          const band = smooth(series.band);
          const low = series.low ? smooth(series.low) : curve.map((y, i) => y - band[i]);
          columns.push(low, low.map((y, i) => y + 2 * band[i]));
        }
        columns.push(weight > 0 && !chart.plain ? series.y : series.y.map(() => null));
        return columns;
      }),
    );
  }

  function lineSeries(chart) {
    const found = [{}];
    const bands = [];
    for (const series of chart.series) {
      const stroke = () => colourOf(series);
      const alone = series.x.length <= 2;
      const main = found.length;
      const companion = { class: "companion", of: main, spanGaps: true, points: { show: false } };
      found.push({
        label: series.label,
        class: `k${(series.colour % COLOURS) + 1}`,
        stroke,
        width: 2,
        dash: DASHES[series.dash % DASHES.length],
        spanGaps: true,
        points: { show: chart.plain || alone, size: 7, fill: stroke },
        value: (_, value) => figure(value),
      });
      if (series.band) {
        bands.push({ series: [main + 2, main + 1], fill: () => translucent(colourOf(series), 0.16) });
        found.push({ ...companion }, { ...companion });
      }
      found.push({ ...companion, stroke: () => translucent(colourOf(series), GHOST), width: 1.5 });
    }
    return { series: found, bands };
  }

  function translucent(hex, opacity) {
    return hex + Math.round(opacity * 255).toString(16).padStart(2, "0");
  }

  // --- stacked bars ------------------------------------------------------------------------------------------------

  // uPlot draws one series over the other: the whole stack comes first, then what is left below each part.
  function barColumns(chart, isShown) {
    const sums = chart.series[0].x.map(() => 0);
    const columns = chart.series.map((series, k) => {
      if (isShown(k)) series.y.forEach((value, i) => (sums[i] += value));
      return [...sums];
    });
    return [chart.series[0].x, ...columns.reverse()];
  }

  function barSeries(chart) {
    const found = chart.series.map((series) => ({
      label: series.label,
      class: `k${(series.colour % COLOURS) + 1}`,
      fill: () => colourOf(series),
      width: 0,
      paths: uPlot.paths.bars({ size: [0.8, 60] }),
      points: { show: false },
      value: (_, value, __, i) => figure(i == null ? null : series.y[i]),
    }));
    return { series: [{}, ...found.reverse()], bands: [] };
  }

  // --- both --------------------------------------------------------------------------------------------------------

  function stepRange(chart) {
    const gap = chart.bars ? 0.6 : 0;
    return (plot, low, high) => {
      const steps = plot.data[0];
      return steps.length === 1 ? [steps[0] - 0.6, steps[0] + 0.6] : [low - gap, high + gap];
    };
  }

  function axisRange(chart) {
    return (_, low, high) => {
      if (low == null) return [0, 1];
      const flat = high - low <= 1e-6 * Math.max(Math.abs(low), Math.abs(high));
      const pad = flat ? 0.1 * Math.abs(high) || 1 : 0.06 * (high - low);
      return [chart.zero || chart.bars ? 0 : low - pad, high + pad];
    };
  }

  const wholeLabels = (_, steps) => steps.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : ""));

  // As many digits as tell two neighbours apart.
  function labels(_, values) {
    const step = values[1] - values[0];
    const isWhole = (number) => Math.abs(number - Math.round(number)) < 1e-6 * number;
    let digits = 0;
    while (digits < 9 && !isWhole(step * 10 ** digits)) digits++;
    if (digits > 5 && Math.max(...values.map(Math.abs)) < 1e-3) return values.map((value) => (value === 0 ? "0" : value.toExponential(1)));
    const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    return values.map((value) => (value + 0).toLocaleString("en", format));
  }

  const axisWidth = (_, texts) => 14 + 6.8 * Math.max(3, ...(texts ?? []).map((text) => text.length));

  // The number of the value of series `k` that is nearest to `i`: curves of several runs have steps of their own.
  function nearest(plot, k, i) {
    const values = plot.data[k];
    for (let distance = 0; distance < values.length; distance++) {
      if (values[i - distance] != null) return i - distance;
      if (values[i + distance] != null) return i + distance;
    }
    return i;
  }

  function replaceData(plot, columns) {
    const { min, max } = plot.scales.x; // a zoom stays
    plot.setData(columns, false);
    plot.setScale("x", { min, max });
    showLast(plot);
  }

  function showLast(plot) {
    const end = plot.data[0].length - 1;
    plot.setLegend({ idxs: plot.series.map((_, k) => (k === 0 ? end : nearest(plot, k, end))) });
  }

  function draw(chart, place, weight) {
    const columns = (isShown) => (chart.bars ? barColumns(chart, isShown) : lineColumns(chart, weight));
    const { series, bands } = chart.bars ? barSeries(chart) : lineSeries(chart);
    series[0] = { label: chart.axis, value: (_, step) => (step == null ? "–" : step) };
    const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false } };
    const font = "12px system-ui, sans-serif";
    const options = {
      width: place.clientWidth,
      height: HEIGHT,
      series,
      bands,
      scales: {
        x: { time: false, range: stepRange(chart), ...(chart.axis === "k" ? { distr: 3, log: 2 } : {}) },
        y: { range: axisRange(chart) },
      },
      axes: [
        { ...axis, font, size: 26, gap: 4, values: wholeLabels, grid: { show: false }, ...(chart.axis === "k" ? { splits: (plot) => plot.data[0] } : {}) },
        { ...axis, font, gap: 6, values: labels, size: axisWidth },
      ],
      cursor: { y: false, sync: { key: "steps" }, dataIdx: nearest, points: { size: 8 } },
      legend: { markers: { width: 0 } },
      hooks: {
        ready: [showLast],
        setCursor: [(plot) => plot.cursor.left < 0 && showLast(plot)],
        setSeries: [
          (plot, k, change) => {
            if (change.show === undefined || k === null) return;
            if (chart.bars) replaceData(plot, columns((i) => plot.series[chart.series.length - i].show));
            plot.series.forEach((other, i) => other.of === k && plot.setSeries(i, { show: change.show }));
          },
        ],
      },
    };
    place.replaceChildren();
    const plot = new uPlot(options, columns(() => true), place);
    new ResizeObserver(() => plot.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
    return {
      redraw: () => plot.redraw(),
      // New values of the same curves; a zoom stays.
      update(next) {
        const steps = plot.data[0];
        const { min, max } = plot.scales.x;
        const isWhole = min <= steps[0] && max >= steps[steps.length - 1];
        chart.series.forEach((series, k) => Object.assign(series, next.series[k]));
        plot.setData(columns((k) => plot.series[chart.bars ? chart.series.length - k : k].show), isWhole);
        if (!isWhole) plot.setScale("x", { min, max });
        showLast(plot);
      },
      smooth(value) {
        if (chart.plain || chart.bars) return;
        weight = value;
        replaceData(plot, columns());
      },
    };
  }

  // --- the page ----------------------------------------------------------------------------------------------------

  let charts = [];
  let drawn = []; // by the number of the chart; a hole where it was not opened yet

  function startCharts(data) {
    charts = data;
    drawn = [];
    const places = [...document.querySelectorAll(".plot")];
    const smoothing = document.getElementById("smoothing");
    const start = (k) => (drawn[k] = draw(charts[k], places[k], Number(smoothing?.value ?? 0)));
    places.forEach((place, k) => {
      const folded = place.closest("details:not([open])"); // it has no width before it is opened
      if (folded === null) start(k);
      else folded.addEventListener("toggle", () => start(k), { once: true });
    });
    smoothing?.addEventListener("input", () => {
      smoothing.nextElementSibling.value = smoothing.value;
      drawn.forEach((one) => one.smooth(Number(smoothing.value)));
    });
  }

  // Draw new data in the charts that are there; false where it has other charts or curves.
  function updateCharts(data) {
    const namesOf = (chart) => chart.series.map((series) => series.label).join("\n");
    if (data.length !== charts.length || data.some((chart, k) => namesOf(chart) !== namesOf(charts[k]))) return false;
    data.forEach((chart, k) => (drawn[k] ? drawn[k].update(chart) : Object.assign(charts[k], chart)));
    return true;
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((one) => one.redraw()));

  // What a side shows at each step: what it shows now, and its templates. A step that it lacks shows the one before.
  function framesOf(side) {
    const frames = new Map([[Number(side.dataset.step), side.querySelector(".frame")]]);
    for (const template of side.querySelectorAll("template")) {
      frames.set(Number(template.dataset.step), template.content.firstElementChild);
    }
    return { side, frames, steps: [...frames.keys()].sort((a, b) => a - b) };
  }

  // The last of these frames up to a step, else the first.
  const frameAt = ({ frames, steps }, step) => frames.get(steps.findLast((each) => each <= step) ?? steps[0]);

  function startSlider(slider) {
    const stops = slider.dataset.steps.split(",").map(Number);
    const set = slider.closest(".set");
    const beside = set.querySelector(".beside select");
    const cards = [...set.querySelectorAll("figure")].map((card) => [...card.querySelectorAll(".side")].map(framesOf));
    if (beside) for (const [left, right] of cards) { // both sides choose among all steps of the run
      const frames = new Map([...left.frames, ...right.frames]);
      Object.assign(left, { frames, steps: [...frames.keys()].sort((a, b) => a - b) });
      beside.addEventListener("change", () => left.side.replaceChildren(frameAt(left, Number(beside.value)).cloneNode(true)));
    }
    slider.addEventListener("input", () => {
      const step = stops[Number(slider.value)];
      slider.nextElementSibling.value = String(step);
      for (const card of cards) {
        for (const one of beside ? card.slice(1) : card) if (one.steps.length > 1) one.side.replaceChildren(frameAt(one, step));
      }
    });
  }

  // Shows the cards whose prompt and samples, at any step, have all the words, and unfolds those that were folded.
  function startSearch(field) {
    const part = field.closest("section");
    const textOf = (card) => {
      const later = [...card.querySelectorAll("template")].map((template) => template.content.textContent);
      return [card.textContent, ...later].join("\n").toLowerCase();
    };
    let texts = null; // of the cards, before the slider moves what their templates hold
    const cards = () => [...part.querySelectorAll("figure:not(.chart)")];
    const read = () => (texts ??= new Map(cards().map((card) => [card, textOf(card)])));
    part.addEventListener("input", read, { capture: true, once: true });
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      const prompts = new Set(); // one may have several cards, such as among the best
      const shown = new Set();
      for (const [card, text] of read()) {
        const prompt = card.querySelector("figcaption").textContent;
        prompts.add(prompt);
        card.hidden = !words.every((word) => text.includes(word));
        if (!card.hidden) shown.add(prompt);
        const fold = card.closest("details");
        if (fold && words.length && !card.hidden) fold.open = true;
      }
      field.nextElementSibling.value = words.length ? `${shown.size} of ${prompts.size} prompts` : "";
    });
  }

  // The elements that need scripts, and what moves in them: of the whole page, or of a part that is new.
  function start(part) {
    part.querySelectorAll("[hidden]").forEach((element) => (element.hidden = false));
    part.querySelectorAll("input[data-steps]").forEach(startSlider);
    part.querySelectorAll("input[type=search]").forEach(startSearch);
  }

  start(document);
  startCharts(JSON.parse(document.getElementById("charts").textContent));
  window.phalanx = { start, startCharts, updateCharts }; // for ranks.js, where the page is live

  // --- a picture, enlarged -----------------------------------------------------------------------------------------

  // The pictures of a card that are shown now, such as those of the first and the last step, one in the place of the
  // other: by its buttons, by the arrow keys, and by a click.
  function enlarge(clicked) {
    const card = clicked.closest("figure");
    const images = [...card.querySelectorAll(".side img")];
    const dialog = document.createElement("dialog");
    const prompt = document.createElement("p");
    const bar = document.createElement("div");
    const image = document.createElement("img");
    prompt.textContent = card.querySelector("figcaption").textContent;
    bar.className = "bar";
    let shown = 0;
    const buttons = images.map((each, k) => {
      const button = document.createElement("button");
      const frame = each.closest(".frame");
      button.textContent = [...frame.querySelectorAll(".cap > *")].map((part) => part.textContent).join(", reward ");
      button.addEventListener("click", () => show(k));
      return button;
    });
    const close = document.createElement("button");
    close.textContent = "Close";
    close.className = "close";
    close.addEventListener("click", () => dialog.close());

    function show(k) {
      shown = (k + images.length) % images.length;
      const source = images[shown];
      image.src = source.src;
      image.alt = source.alt;
      image.className = source.className;
      image.style.setProperty("--natural", `${source.naturalWidth}px`);
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === shown)));
    }

    image.addEventListener("click", () => (images.length > 1 ? show(shown + 1) : dialog.close()));
    dialog.addEventListener("keydown", (event) => {
      if (event.key === "ArrowRight") show(shown + 1);
      if (event.key === "ArrowLeft") show(shown - 1);
    });
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    bar.append(...buttons, close);
    dialog.append(prompt, bar, image);
    document.body.append(dialog);
    show(images.indexOf(clicked));
    dialog.showModal();
  }

  document.addEventListener("click", (event) => event.target.matches(".side img") && enlarge(event.target));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches(".side img")) enlarge(event.target);
  });
})();
