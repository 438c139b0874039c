"use strict";
// The table of a folder of runs: it sorts, filters, and compares the runs that are ticked. The data is that of
// phalanx.tools.board.runs_page.RunTable; a live page asks phalanx.tools.board.watch for it again. Only the rows in view are
// in the page, so that 100,000 scroll as smoothly as ten. All texts are set as texts.
(() => {
  const POLL_MS = 5000;
  const ROW = 31; // pixels, as in report.css
  const BEYOND = 3; // rows above and below those in view
  const MOST_CURVES = 8; // of runs that are compared before any is ticked
  const TIME = "time";

  const place = document.getElementById("runs");
  const compared = document.getElementById("compared");
  const isLive = place.hasAttribute("data-live");
  const token = new URLSearchParams(location.search).get("token");
  let table = JSON.parse(document.getElementById("of-runs").textContent);
  let order = []; // numbers of the rows that are shown
  let sorting = { column: -1, down: true };
  let haystacks = [];
  const chosen = new Set(); // names of runs

  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function shown(value, column) {
    if (value == null) return "–";
    if (typeof value !== "number") return value;
    if (table.columns[column] !== TIME) return String(Number(value.toPrecision(4)));
    const seconds = Math.round(value);
    const two = (part) => String(part).padStart(2, "0");
    return `${Math.floor(seconds / 3600)}:${two(Math.floor(seconds / 60) % 60)}:${two(seconds % 60)}`;
  }

  // --- the table ---------------------------------------------------------------------------------------------------

  const field = make("input");
  field.type = "search";
  field.placeholder = "words, or lr>0.001";
  const count = make("output", "n");
  const label = make("label", "search", "Filter ");
  label.append(field, count);
  const grid = make("div", "grid");
  grid.tabIndex = 0;
  const head = make("div", "head");
  const body = make("div", "body");
  const whole = make("div"); // no <table>, whose layout takes several times as long
  whole.append(head, body);
  [whole, head, body].forEach((part, k) => part.setAttribute("role", k ? "rowgroup" : "table"));
  grid.append(whole);
  const hint = "Click a heading to sort. Filter by words of any column, or by a column's value, such as steps>100 or state=running. Tick runs to compare them.";
  place.append(label, grid, make("p", "n", hint));

  // A term of the filter as a test of a row: a comparison with a column whose name ends so, or a word.
  function testOf(term) {
    const match = term.match(/^([^<>=]+)(<=|>=|=|<|>)(.+)$/);
    const column = match ? table.columns.findIndex((name) => `.${name}`.toLowerCase().endsWith(`.${match[1]}`)) : -1;
    if (column < 0) return (row) => (haystacks[row] ??= table.rows[row].map(shown).join(" ").toLowerCase()).includes(term);
    const [, , sign, text] = match;
    const number = Number(text);
    return (row) => {
      const value = table.rows[row][column];
      if (value == null) return false;
      if (sign === "=") return typeof value === "number" ? value === number : value.toLowerCase() === text;
      if (typeof value !== "number" || Number.isNaN(number)) return false;
      return sign === "<" ? value < number : sign === ">" ? value > number : sign === "<=" ? value <= number : value >= number;
    };
  }

  function arrange() {
    const tests = field.value.toLowerCase().split(/\s+/).filter(Boolean).map(testOf);
    order = [];
    for (let row = 0; row < table.rows.length; row++) if (tests.every((test) => test(row))) order.push(row);
    const { column, down } = sorting;
    if (column >= 0) {
      const sign = down ? -1 : 1;
      const key = (row) => table.rows[row][column];
      const texts = new Intl.Collator("en", { numeric: true });
      order.sort((a, b) => {
        const [one, two] = [key(a), key(b)];
        if (one == null || two == null) return (one == null) - (two == null); // missing values come last
        if (typeof one === "number" && typeof two === "number") return sign * (one - two);
        return sign * texts.compare(one, two);
      });
    }
    count.value = `${order.length} of ${table.rows.length}`;
    drawRows(true);
    compare();
  }

  let widths = []; // of the columns, in pixels

  function cellOf(role, column) {
    const cell = make("div", "cell");
    cell.setAttribute("role", role);
    cell.style.width = `${widths[column]}px`;
    return cell;
  }

  function drawHead() {
    const line = make("div", "row");
    line.setAttribute("role", "row");
    widths = table.columns.map((name, column) => {
      const longest = table.rows.slice(0, 200).reduce((most, row) => Math.max(most, shown(row[column], column).length), 0);
      return Math.min(Math.max(longest, name.split(".").at(-1).length + 2, 5) * 7.5 + (column ? 22 : 48), column ? 340 : 400);
    });
    whole.style.width = `${widths.reduce((sum, width) => sum + width, 0)}px`;
    table.columns.forEach((name, column) => {
      const cell = cellOf("columnheader", column);
      cell.textContent = name.split(".").at(-1) + (sorting.column === column ? (sorting.down ? " ▼" : " ▲") : "");
      cell.title = name;
      cell.tabIndex = 0;
      cell.setAttribute("aria-sort", sorting.column !== column ? "none" : sorting.down ? "descending" : "ascending");
      const sort = () => {
        sorting = { column, down: sorting.column === column ? !sorting.down : typeof table.rows[0]?.[column] === "number" };
        drawHead();
        arrange();
      };
      cell.addEventListener("click", sort);
      cell.addEventListener("keydown", (event) => event.key === "Enter" && sort());
      line.append(cell);
    });
    head.replaceChildren(line);
  }

  let pool = []; // rows of the page: the one at a place shows, of all places that are equal modulo their number, that in view

  function newRow() {
    const line = make("div", "row");
    line.setAttribute("role", "row");
    const name = cellOf("rowheader", 0);
    const tick = make("input");
    tick.type = "checkbox";
    tick.addEventListener("change", () => {
      const run = table.rows[line.row][0];
      if (tick.checked) chosen.add(run);
      else chosen.delete(run);
      line.classList.toggle("chosen", tick.checked);
      compare();
    });
    const link = make("a");
    name.append(tick, link);
    line.append(name, ...table.columns.slice(1).map((_, k) => cellOf("cell", k + 1)));
    for (const cell of [link, ...[...line.children].slice(1)]) cell.append(""); // a text, of which only the data changes
    return line;
  }

  function fill(line, row) {
    const cells = table.rows[row];
    line.row = row;
    const [tick, link] = line.firstChild.children;
    tick.checked = chosen.has(cells[0]);
    tick.setAttribute("aria-label", `compare ${cells[0]}`);
    line.classList.toggle("chosen", tick.checked);
    link.firstChild.data = link.title = cells[0];
    const address = isLive ? pageOf([cells[0]]) : table.reports[row];
    if (address) link.href = address;
    else link.removeAttribute("href");
    for (let column = 1; column < cells.length; column++) line.children[column].firstChild.data = shown(cells[column], column);
  }

  function drawRows(again) {
    const size = Math.min(order.length, Math.ceil(grid.clientHeight / ROW) + 2 * BEYOND);
    const top = Math.max(0, Math.min(Math.floor(grid.scrollTop / ROW) - BEYOND, order.length - size));
    if (pool.length !== size || again) {
      pool = Array.from({ length: size }, newRow);
      body.replaceChildren(...pool);
      body.style.height = `${order.length * ROW}px`;
    }
    for (let place = top; place < top + size; place++) {
      const line = pool[place % size];
      if (line.place === place) continue;
      line.place = place;
      line.style.transform = `translateY(${place * ROW}px)`;
      fill(line, order[place]);
    }
  }

  let isDue = false;
  grid.addEventListener("scroll", () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      drawRows(false);
    });
  }, { passive: true });

  // --- the comparison ----------------------------------------------------------------------------------------------

  const pageOf = (names) => `/?${new URLSearchParams({ of: JSON.stringify(names), ...(token ? { token } : {}) })}`;

  // Runs by what differs between them: their settings, else their names.
  function namesOf(rows) {
    const end = table.columns.length - 1;
    const names = rows.map((row) => {
      const parts = [];
      for (let column = end - table.settings; column < end; column++) {
        if (rows.some((other) => table.rows[other][column] !== table.rows[row][column])) {
          parts.push(`${table.columns[column].split(".").at(-1)}=${shown(table.rows[row][column], column)}`);
        }
      }
      return parts.length <= 3 ? parts.join(", ") : "";
    });
    return names.map((name, k) => (name && names.filter((other) => other === name).length === 1 ? name : table.rows[rows[k]][0]));
  }

  function compare() {
    const rows = chosen.size ? table.rows.flatMap((row, k) => (chosen.has(row[0]) ? [k] : [])) : order.slice(0, MOST_CURVES);
    const names = namesOf(rows);
    const metrics = [...new Set(rows.flatMap((row) => Object.keys(table.curves[row])))];
    const heading = chosen.size ? `The ${rows.length} ticked runs` : `The first ${rows.length} runs of the table`;
    const parts = [make("h2", "", heading)];
    if (chosen.size && isLive) {
      const link = make("a", "", "Open their curves, samples and settings");
      link.href = pageOf(rows.map((row) => table.rows[row][0]));
      parts.push(link);
    }
    const charts = make("div", "charts");
    const data = metrics.map((metric) => {
      const figure = make("figure", "chart");
      figure.append(make("figcaption", "", metric), make("div", "plot n"));
      charts.append(figure);
      const series = [];
      rows.forEach((row, k) => {
        const curve = table.curves[row][metric];
        if (curve) series.push({ ...curve, label: names[k], colour: k, dash: Math.floor(k / 8) });
      });
      return { bars: false, plain: metric.startsWith("val/"), zero: false, axis: "step", series };
    });
    parts.push(charts);
    if (chosen.size > 1) parts.push(differences(rows, names));
    compared.replaceChildren(...parts);
    window.phalanx.startCharts(data);
  }

  // The columns in which runs differ, as rows.
  function differences(rows, names) {
    const box = make("div", "scroll comparison");
    const whole = make("table");
    const head = make("tr");
    for (const name of ["", ...names]) head.append(make("th", "", name));
    whole.append(make("thead"), make("tbody"));
    whole.firstChild.append(head);
    table.columns.forEach((name, column) => {
      const cells = rows.map((row) => table.rows[row][column]);
      if (cells.every((cell) => cell === cells[0])) return;
      const line = make("tr");
      line.append(make("th", "", name), ...cells.map((cell) => make("td", "", shown(cell, column))));
      whole.lastChild.append(line);
    });
    box.append(whole);
    return box;
  }

  // --- the page ----------------------------------------------------------------------------------------------------

  let waiting = 0;
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(arrange, 80);
  });
  new ResizeObserver(() => drawRows(true)).observe(grid);

  function show(next) {
    table = next;
    haystacks = [];
    grid.style.height = `${ROW * (table.rows.length + 1) + 18}px`;
    drawHead();
    arrange();
  }

  let seen = "";
  async function poll() {
    try {
      const answer = document.hidden ? {} : await fetch(`/table?${new URLSearchParams({ seen, ...(token ? { token } : {}) })}`, { cache: "no-store" }).then((reply) => reply.json());
      if (answer.seen) seen = answer.seen;
      if (answer.table) show(answer.table);
    } catch (error) {
      count.value = `no answer of phalanx watch: ${error.message}`;
    }
    setTimeout(poll, POLL_MS);
  }

  show(table);
  if (isLive) poll();
})();
