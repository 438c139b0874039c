"use strict";
// The ranks of a run: where each of them is, a step as a timeline, events and logs. The data is that of
// phalanx.tools.board.rank_history, in the report from the page itself; a live page asks phalanx.tools.board.watch for it, and
// for new sections of the report. All texts are set as texts: what a model or a library says is never markup.
(() => {
  const POLL_MS = 2000;
  const PHASES = ["rollout", "judge", "reward", "update", "checkpoint", "validation"]; // as in the charts of seconds
  const WAITING = ["wait", "idle"];
  const SILENT = 4; // intervals without a sign of life, after which a rank is marked
  const ROW = 14;
  const LABEL = 64;
  const PADDING = 28; // of .timeline in report.css, both sides

  const place = document.getElementById("ranks");
  const embedded = JSON.parse(document.getElementById("of-ranks").textContent);
  const isLive = place.hasAttribute("data-live");
  const names = JSON.parse(place.dataset.runs);
  const given = Object.fromEntries(new URLSearchParams(location.search)); // the token, and the runs of a folder
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function shortly(seconds) {
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
    return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  }

  const precise = (seconds) => `${Number(seconds.toPrecision(3))} s`;
  const clock = (at) => new Date(1000 * at).toLocaleString();

  async function ask(path, query) {
    const address = new URL(path, location.origin);
    for (const [name, value] of Object.entries({ ...given, ...query })) address.searchParams.set(name, value);
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) throw new Error((await answer.text()).trim());
    return answer.json();
  }

  // --- the parts of the section ------------------------------------------------------------------------------------

  const picker = make("select");
  picker.setAttribute("aria-label", "Run");
  names.forEach((name, k) => picker.append(new Option(name, String(k))));
  const status = make("p", "status");
  status.setAttribute("role", "status");
  const table = make("div", "scroll table");
  table.tabIndex = 0;
  const slider = make("input");
  slider.type = "range";
  const shownStep = make("output");
  const sliding = make("label", "slider");
  sliding.append("Step ", slider, shownStep);
  const canvas = make("canvas");
  canvas.setAttribute("role", "img");
  const timeline = make("div", "timeline");
  timeline.tabIndex = 0;
  timeline.append(canvas);
  const legend = make("p", "legend n");
  const pointed = make("p", "n pointed", " ");
  const blame = make("p", "note");
  const events = make("div", "scroll events");
  events.tabIndex = 0;
  const logOf = make("select");
  logOf.setAttribute("aria-label", "Log of rank");
  const log = make("pre", "log");
  log.tabIndex = 0;

  if (names.length > 1) place.append(picker);
  place.append(status, table, make("h3", "", "A step by rank"), sliding, timeline, pointed, legend, blame);
  place.append(make("h3", "", "Events"), events);
  if (isLive) {
    const heading = make("h3", "", "Log of rank ");
    heading.append(logOf);
    place.append(heading, log);
  }

  let data = null;
  let asked = null; // the step that the slider shows; null: the newest

  // --- each rank now -----------------------------------------------------------------------------------------------

  function waitedBy(rank) {
    let seconds = 0;
    for (const [who, late, from, to] of data.waits) if (who === rank && late !== rank) seconds += to - from;
    for (const [who, name, from, to] of data.spans) if (who === rank && WAITING.includes(name)) seconds += to - from;
    return seconds;
  }

  function showRanks() {
    const roles = new Set(data.ranks.map((rank) => rank.role)).size > 1;
    const columns = ["rank", ...(roles ? ["role"] : []), "host", "step", ...(isLive ? ["phase", "for", "last sign of life"] : [])];
    columns.push("memory", "rate", "of the step: works", "waits");
    const head = make("tr");
    columns.forEach((name) => head.append(make("th", "", name)));
    const body = make("tbody");
    for (const rank of data.ranks) {
      const row = make("tr");
      const age = data.now - rank.at;
      const isSilent = isLive && !rank.ended && age > SILENT * rank.interval;
      const waited = waitedBy(rank.rank);
      const name = make("th", "", String(rank.rank));
      name.scope = "row";
      row.append(name);
      const cells = [...(roles ? [rank.role] : []), rank.host, rank.step ?? "–"];
      if (isLive) {
        cells.push(rank.ended ?? (rank.phase || "between phases"), rank.ended ? "–" : shortly(data.now - rank.phase_since));
        cells.push(`${shortly(age)} ago`);
      }
      cells.push(rank.memory_gb === undefined ? "–" : `${rank.memory_gb.toFixed(2)} GB`, rank.rate || "–");
      const share = data.seconds > 0 ? waited / data.seconds : 0;
      cells.push(data.step === null ? "–" : `${(100 * (1 - share)).toFixed(0)} %`, data.step === null ? "–" : precise(waited));
      cells.forEach((cell) => row.append(make("td", "", String(cell))));
      if (isSilent) row.className = "silent";
      body.append(row);
    }
    const whole = make("table");
    const top = make("thead");
    top.append(head);
    whole.append(top, body);
    table.replaceChildren(whole);
  }

  function showStatus() {
    const parts = [];
    if (data.state) parts.push(data.state);
    parts.push(data.total == null ? `step ${data.done}` : `step ${data.done} of ${data.total}`);
    if (data.state === "running" && data.eta_s != null) parts.push(`${shortly(data.eta_s)} left`);
    const hosts = new Set(data.ranks.map((rank) => rank.host)).size;
    parts.push(`${data.ranks.length} ${data.ranks.length === 1 ? "rank" : "ranks"} on ${hosts} ${hosts === 1 ? "host" : "hosts"}`);
    if (!data.ranks.length) parts.push("no files of ranks in this folder");
    status.textContent = parts.join(" · ");
    status.dataset.state = data.state ?? "";
  }

  // --- a step as a timeline ----------------------------------------------------------------------------------------

  const colours = new Map();

  function colourOf(name) {
    const plain = name.replace(/^(writer|painter)_/, "");
    if (WAITING.includes(plain)) return css("--line");
    if (!colours.has(plain)) {
      const known = PHASES.indexOf(plain);
      colours.set(plain, known >= 0 ? known + 1 : PHASES.length + 1 + (colours.size % 2));
    }
    return css(`--c${colours.get(plain)}`);
  }

  function hatched(draw) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = tile.getContext("2d");
    pen.fillStyle = css("--card");
    pen.fillRect(0, 0, 6, 6);
    pen.strokeStyle = css("--soft");
    pen.beginPath();
    for (const x of [-6, 0, 6]) {
      pen.moveTo(x, 6);
      pen.lineTo(x + 6, 0);
    }
    pen.stroke();
    return draw.createPattern(tile, "repeat");
  }

  function drawTimeline() {
    const shows = data.step !== null;
    [sliding, timeline, pointed, legend].forEach((element) => (element.hidden = !shows));
    if (!shows) {
      blame.textContent = "No step has ended yet.";
      return;
    }
    const width = Math.max(timeline.clientWidth - PADDING, 240);
    const height = ROW * data.ranks.length + 18;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const scale = (width - LABEL - 4) / data.seconds;
    const rowOf = new Map(data.ranks.map((rank, k) => [rank.rank, k]));
    const bar = (rank, from, to, top, size) => {
      pen.fillRect(LABEL + scale * from, ROW * rowOf.get(rank) + top, Math.max(scale * (to - from), 0.5), size);
    };
    data.ranks.forEach((rank, k) => {
      pen.fillStyle = css("--soft");
      pen.fillText(`rank ${rank.rank}`, 0, ROW * k + ROW / 2);
      pen.fillStyle = css("--line");
      pen.fillRect(LABEL, ROW * k + ROW - 1, width - LABEL - 4, 0.5);
    });
    const longest = [...data.spans].sort((a, b) => b[3] - b[2] - (a[3] - a[2])); // phases within phases come last
    for (const [rank, name, from, to] of longest) {
      pen.fillStyle = colourOf(name);
      bar(rank, from, to, 1, ROW - 3);
    }
    pen.fillStyle = hatched(pen);
    for (const [rank, late, from, to] of data.waits) if (rank !== late) bar(rank, from, to, 1, ROW - 3);
    pen.fillStyle = css("--soft");
    const ticks = width < 500 ? 2 : 5;
    for (let k = 0; k <= ticks; k++) {
      pen.textAlign = k === 0 ? "left" : k === ticks ? "right" : "center";
      pen.fillText(precise((data.seconds * k) / ticks), LABEL + (scale * data.seconds * k) / ticks, height - 7);
    }
    const seen = [...new Set(data.spans.map((span) => span[1]))];
    legend.replaceChildren();
    for (const name of seen) {
      const mark = make("i");
      mark.style.background = colourOf(name);
      legend.append(mark, `${name} `);
    }
    legend.append(make("i", "waits"), "waits in a collective for the rank that comes last");
    describe();
  }

  function describe() {
    const ranks = data.ranks.length;
    const apart = data.spans.filter((span) => WAITING.includes(span[1])).reduce((sum, [, , from, to]) => sum + to - from, 0);
    if (!data.blame.length && apart > 0) {
      blame.textContent = `Ranks of one role waited ${precise(apart)} for another role.`;
    } else if (!data.blame.length) {
      blame.textContent = ranks > 1 ? "In this step no rank waited for another." : "There is no other rank to wait for.";
    } else {
      const parts = data.blame.slice(0, 3).map(([rank, seconds]) => `rank ${rank} (${precise(seconds)})`);
      const total = data.blame.reduce((sum, [, seconds]) => sum + seconds, 0);
      const share = (100 * total) / (ranks * data.seconds);
      blame.textContent = `The others waited for: ${parts.join(", ")}. That is ${share.toFixed(1)} % of the time of ${ranks} ranks in this step.`;
    }
    canvas.setAttribute("aria-label", `Step ${data.step} by rank, ${precise(data.seconds)}. ${blame.textContent}`);
  }

  canvas.addEventListener("pointermove", (event) => {
    const rank = data.ranks[Math.floor(event.offsetY / ROW)]?.rank;
    const at = ((event.offsetX - LABEL) / (canvas.clientWidth - LABEL - 4)) * data.seconds;
    const within = ([who, , from, to]) => who === rank && from <= at && at <= to;
    const span = data.spans.filter(within).at(-1);
    const wait = data.waits.filter(within).find(([who, late]) => who !== late);
    const parts = [];
    if (span) parts.push(`rank ${rank}: ${span[1]}, ${precise(span[3] - span[2])}`);
    if (wait) parts.push(`waits ${precise(wait[3] - wait[2])} for rank ${wait[1]}`);
    pointed.textContent = parts.join("; ") || " ";
  });

  function showStep() {
    if (data.step === null) return;
    [slider.min, slider.max] = data.steps;
    slider.value = data.step;
    shownStep.value = String(data.step);
  }

  slider.addEventListener("input", () => {
    asked = Number(slider.value) === Number(slider.max) ? null : Number(slider.value);
    shownStep.value = slider.value;
    if (isLive) refresh();
  });

  // --- events and logs ---------------------------------------------------------------------------------------------

  function showEvents() {
    const list = make("ul");
    for (const event of [...data.events].reverse()) {
      const item = make("li", `event ${["failed", "error", "warning", "restart", "said"].includes(event.kind) ? "bad" : ""}`);
      item.append(make("time", "", clock(event.at)), make("b", "", event.kind), make("span", "", `rank ${event.rank}`));
      item.append(make("span", "words", event.text));
      list.append(item);
    }
    if (!data.events.length) list.append(make("li", "", "none"));
    events.replaceChildren(list);
  }

  function showLogs() {
    const ranks = data.ranks.map((rank) => String(rank.rank));
    if (ranks.join() === [...logOf.options].map((option) => option.value).join()) return;
    const before = logOf.value;
    logOf.replaceChildren(...ranks.map((rank) => new Option(rank, rank)));
    if (ranks.includes(before)) logOf.value = before;
  }

  async function refreshLog() {
    if (!logOf.value) return;
    const rank = logOf.value;
    const { text } = await ask("/log", { run: picker.value, rank });
    if (rank !== logOf.value || text === log.textContent) return;
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4 || !log.textContent;
    log.textContent = text || "(nothing yet)";
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  // --- the page ----------------------------------------------------------------------------------------------------

  function show(next) {
    data = next;
    showStatus();
    showStep();
    showRanks();
    drawTimeline();
    showEvents();
    showLogs();
  }

  async function refresh() {
    show(await ask("/ranks", { run: picker.value, ...(asked === null ? {} : { step: asked }) }));
    await refreshLog();
  }

  // A section of the report, as the server has it now. The server escapes all texts in it, and the page's policy lets no
  // script run but its own; its folds stay as they are.
  function replace(id, html) {
    const next = new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
    const before = document.getElementById(id);
    const open = [...before.querySelectorAll("details")].map((fold) => fold.open);
    next.querySelectorAll("details").forEach((fold, k) => k < open.length && (fold.open = open[k]));
    const sought = before.querySelector("input[type=search]")?.value;
    before.replaceWith(next);
    window.phalanx.start(next);
    if (!sought) return;
    const field = next.querySelector("input[type=search]");
    field.value = sought;
    field.dispatchEvent(new Event("input"));
  }

  let seen = "";
  let kept = "";

  async function refreshSections() {
    const answer = await ask("/sections", { seen, kept });
    ({ seen, kept } = answer);
    if (!answer.charts) return;
    for (const id of ["headline", "samples", "tables"]) if (answer[id]) replace(id, answer[id]);
    if (window.phalanx.updateCharts(answer.charts)) return;
    const smoothing = document.getElementById("smoothing")?.value ?? "0";
    replace("curves", answer.curves);
    const slider = document.getElementById("smoothing");
    if (slider) slider.value = slider.nextElementSibling.value = smoothing;
    window.phalanx.startCharts(answer.charts);
  }

  async function poll() {
    try {
      if (!document.hidden) {
        await refresh();
        await refreshSections();
      }
    } catch (error) {
      // fetch itself fails with a TypeError; other words are the server's
      status.textContent = error instanceof TypeError ? `no answer of phalanx watch: ${error.message}` : error.message;
      status.dataset.state = "dead";
    }
    setTimeout(poll, POLL_MS);
  }

  picker.addEventListener("change", () => {
    asked = null;
    if (isLive) refresh();
    else show(embedded[Number(picker.value)]);
  });
  logOf.addEventListener("change", () => {
    log.textContent = "";
    refreshLog();
  });
  new ResizeObserver(() => data && drawTimeline()).observe(place);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => data && drawTimeline());
  if (isLive) poll();
  else {
    slider.disabled = true; // the report holds the last step
    show(embedded[0]);
  }
})();
