"use strict";
// The page: it asks the server for pages of the table, curves, frames and values, and never holds them all.

const at = (id) => document.getElementById(id);
const STATE = new URLSearchParams(location.hash.slice(1)); // where=…, episode=…: so that a reload shows the same
const NOTHING = "–";
let info, table, version = -1;
const panes = [];

async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) for (const each of [value].flat()) query.append(name, each);
  return answer(await fetch(`${path}?${query}`));
}

async function answer(response) {
  const value = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(value.error);
  return value;
}

function say(error) {
  at("problem").textContent = error ? error.message : "";
  at("problem").hidden = !error;
}

function make(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

const guarded = (work) => async (...given) => {
  try { const value = await work(...given); say(null); return value; } catch (error) { say(error); }
};

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const PALETTE = ["#3b7ddd", "#e07b39", "#3aa76d", "#c94f7c", "#8a63d2", "#a58a2d", "#2fa3b5", "#8c8c8c"];

// Conditions

const conditions = () => STATE.getAll("where");

function keep(state) {
  history.replaceState(null, "", `#${state}`);
}

function setConditions(all) {
  STATE.delete("where");
  for (const each of new Set(all)) STATE.append("where", each);
  keep(STATE);
  showConditions();
  refresh();
}

function showConditions() {
  at("conditions").replaceChildren(...conditions().map((text) => {
    const chip = make("li", text), remove = make("button", "×");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${text}`);
    remove.onclick = () => setConditions(conditions().filter((each) => each !== text));
    chip.append(" ", remove);
    return chip;
  }));
}

const showHistograms = guarded(async () => {
  const all = await ask("histograms", { where: conditions() });
  at("histograms").replaceChildren();
  for (const [name, [counts, edges]] of Object.entries(all)) {
    const figure = make("figure"), caption = make("figcaption", name);
    figure.append(caption);
    at("histograms").append(figure);
    const middles = counts.map((_, i) => (edges[i] + edges[i + 1]) / 2);
    new uPlot({
      width: 190, height: 96, legend: { show: false }, cursor: { y: false, drag: { x: true, y: false, setScale: false } },
      scales: { x: { time: false, range: edges.at(-1) - edges[0] > 1e-12 * Math.abs(edges[0]) ? [edges[0], edges.at(-1)] : rangeOf(edges[0], edges.at(-1)) } },
      axes: [axis(), { ...axis(), show: false }],
      series: [{}, { fill: color("--accent"), stroke: color("--accent"), paths: uPlot.paths.bars({ size: [0.9] }), points: { show: false } }],
      hooks: { setSelect: [(plot) => {
        if (plot.select.width < 3) return;
        const [low, high] = [plot.select.left, plot.select.left + plot.select.width].map((x) => Number(plot.posToVal(x, "x").toPrecision(6)));
        const others = conditions().filter((each) => !each.startsWith(`${name}>=`) && !each.startsWith(`${name}<=`));
        setConditions([...others, `${name}>=${low}`, `${name}<=${high}`]);
      }] },
    }, [middles, counts], figure);
  }
});

function rangeOf(low, high) { // uPlot finds no ticks between numbers that differ in their last digits only
  const size = Math.max(Math.abs(low), Math.abs(high)), pad = Math.max(1, 1e-6 * size);
  return high - low > 1e-12 * size ? uPlot.rangeNum(low, high, 0.1, true) : [low - pad, high + pad];
}

const axis = () => ({ stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") }, font: "11px system-ui", size: 34, space: 44 });

// The table

function columnsOf() {
  const images = Object.keys(info.fields).filter((name) => info.fields[name] === "image");
  const order = ["shard", "serial", "mark"].filter((name) => name in info.columns);
  const columns = [...new Set([...order, ...Object.keys(info.columns)])].map((name) => [name, info.columns[name]]).map(([name, kind]) => ({
    title: name, field: name, headerSortTristate: true, minWidth: 76, hozAlign: "biuf".includes(kind) ? "right" : "left",
    formatter: (cell) => told(cell.getValue(), name),
  }));
  if (images.length) columns.splice("shard" in info.columns ? 2 : 1, 0, {
    title: "first, last", headerSort: false, minWidth: 110,
    formatter: (cell) => {
      const both = make("span", "", "thumbnails");
      for (const t of [0, -1]) both.append(picture(cell.getData()._id, images[0], t, 88));
      return both;
    },
  });
  return columns;
}

function told(value, name) {
  if (name === "mark") {
    const labels = make("span", "", "labels");
    labels.append(...value.map((label) => make("span", label, label === "good" || label === "bad" ? label : "")));
    return labels;
  }
  const text = name === "published" ? (value ? new Date(1000 * value).toLocaleString() : NOTHING) : Array.isArray(value) ? value.join(", ") : value === null ? NOTHING
    : typeof value === "number" ? String(Number(value.toPrecision(Number.isInteger(value) ? 17 : 5))) : String(value);
  return make("span", text); // as text: a stranger's folder may hold anything
}

function picture(episode, field, t, size) {
  const image = make("img");
  image.loading = "lazy";
  image.alt = `${field} of episode ${episode}, ${t < 0 ? "the last step" : `step ${t}`}`;
  image.src = `frame/${episode}/${encodeURIComponent(field)}/${t}?size=${size}&v=${version}`;
  return image;
}

function makeTable() {
  table = new Tabulator("#table", {
    nestedFieldSeparator: false,
    columns: columnsOf(), columnDefaults: { resizable: "header", vertAlign: "middle" }, layout: "fitDataStretch", index: "_id", selectableRows: 1, placeholder: "No episode matches",
    pagination: true, paginationMode: "remote", paginationSize: 25, sortMode: "remote", columnHeaderSortMulti: false,
    ajaxURL: "episodes",
    ajaxRequestFunc: guarded(async (_url, _config, given) => {
      const [sorter] = given.sort ?? [];
      const page = await ask("episodes", { where: conditions(), page: given.page, size: given.size, ...(sorter && { sort: sorter.field, dir: sorter.dir }) });
      at("count").textContent = page.last_row === page.total ? `${page.total} episodes` : `${page.last_row} of ${page.total} episodes`;
      return page;
    }),
  });
  table.on("rowClick", (_event, row) => open(row.getData()));
  table.on("dataProcessed", () => panes.length && table.selectRow(panes.at(-1).id));
}

const refresh = guarded(async () => {
  await Promise.all([table.replaceData(), showHistograms()]);
});

const look = guarded(async () => {
  const now = await ask("version");
  if (now.progress < 1) at("count").title = `returns of ${Math.floor(100 * now.progress)} % are there`;
  if (version >= 0 && now.version !== version) {
    version = now.version;
    const fresh = await ask("info");
    if (Object.keys(fresh.columns).join() !== Object.keys(info.columns).join()) { info = fresh; table.setColumns(columnsOf()); }
    await Promise.all([table.replaceData(), showHistograms()]);
  }
  version = now.version;
});

// Episodes in depth

class Pane {
  constructor(row) {
    this.row = row;
    this.id = row._id;
    this.element = at("pane").content.firstElementChild.cloneNode(true);
    this.plots = [];
    this.t = 0;
    const find = (selector) => this.element.querySelector(selector);
    [this.time, this.step, this.frames, this.curves, this.values, this.play] = [".time", ".step", ".frames", ".curves", ".values", ".play"].map(find);
    find("h2").textContent = `Episode ${row._id}`;
    find(".close").onclick = () => close(this);
    this.rate = find(".rate input");
    this.rate.value = info.rate;
    this.time.oninput = () => this.show(Number(this.time.value));
    this.play.onclick = () => this.toggle();
    const [serial, shard = ""] = row._id.split("-").reverse();
    find(".rerun").textContent = `memmap-buffer view ${info.places[shard]} ${serial}`;
    this.showMark();
  }

  showMark() {
    const labels = (this.row.mark ?? []).map((label) => make("span", label, label === "good" || label === "bad" ? label : ""));
    const ended = this.row.end ? [make("span", this.row.end)] : [];
    this.element.querySelector(".labels").replaceChildren(...labels, ...ended);
    this.element.querySelector(".note").textContent = this.row.note ?? "";
  }

  async load() {
    const { length, final } = await ask(`episode/${this.id}`);
    this.length = length;
    this.last = final ? length : length - 1; // the final observation stands behind the last step
    this.time.max = this.last;
    for (const [name, kind] of Object.entries(info.fields)) {
      if (kind !== "image") continue;
      const figure = make("figure"), image = picture(this.id, name, 0, 512);
      image.loading = "eager";
      image.dataset.field = name;
      figure.append(image, make("figcaption", name));
      this.frames.append(figure);
    }
    for (const [name, kind] of Object.entries(info.fields)) {
      if (kind === "curve") await this.plot(name, false);
      if (name === info.reward) await this.plot(name, true);
    }
    await this.show(0);
  }

  ask(name, total, begin = 0, stop = this.length) {
    const points = 2 * Math.max(200, this.curves.clientWidth);
    return ask(`curve/${this.id}/${encodeURIComponent(name)}`, { begin, stop, points, ...(total && { total: 1 }) });
  }

  async plot(name, total) {
    const data = await this.ask(name, total), figure = make("figure");
    figure.append(make("figcaption", total ? `${name}, summed up` : name));
    this.curves.append(figure);
    const series = data.lines.map((_, i) => ({ label: `${i}`, stroke: PALETTE[i % PALETTE.length], width: 1.2, points: { show: data.x.length < 60, size: 4 } }));
    const plot = new uPlot({
      width: Math.max(220, this.curves.clientWidth - 4), height: 120, legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false }, sync: { key: "steps" } },
      scales: { x: { time: false }, y: { range: (_plot, low, high) => rangeOf(low, high) } },
      axes: [axis(), { ...axis(), size: 52 }], series: [{}, ...series],
      hooks: {
        setScale: [(plot, key) => key === "x" && this.zoomed(plot, name, total)],
        ready: [(plot) => plot.over.addEventListener("click", () => this.show(Math.round(plot.posToVal(plot.cursor.left, "x"))))],
        draw: [(plot) => {
          const x = plot.valToPos(this.t, "x", true), { top, height } = plot.bbox;
          plot.ctx.fillStyle = color("--accent");
          plot.ctx.fillRect(x - 1, top, 2, height);
        }],
      },
    }, [data.x, ...data.lines], figure);
    this.plots.push(plot);
  }

  async zoomed(plot, name, total) {
    const { min, max } = plot.scales.x, key = `${min} ${max}`;
    if (plot.zoom === undefined) { plot.zoom = key; return; }
    if (plot.zoom === key || min === undefined) return;
    plot.zoom = key;
    const data = await this.ask(name, total, Math.max(0, Math.floor(min) - 1), Math.ceil(max) + 2);
    if (plot.zoom === key) { plot.setData([data.x, ...data.lines], false); plot.redraw(); }
  }

  async show(t) {
    this.t = Math.min(Math.max(0, t), this.last);
    this.time.value = this.t;
    const final = this.t === this.length;
    this.step.textContent = final ? "final observation" : `${this.t} of ${this.length - 1}`;
    this.place = final ? [this.t - 1, "&final=1"] : [this.t, ""];
    for (const image of this.frames.querySelectorAll("img")) image.src = `frame/${this.id}/${encodeURIComponent(image.dataset.field)}/${this.place[0]}?size=512&v=${version}${this.place[1]}`;
    for (const plot of this.plots) plot.redraw(false);
    clearTimeout(this.asking);
    this.asking = setTimeout(guarded(() => this.showValues(this.t)), 60);
  }

  async showValues(t) {
    const values = await ask(`values/${this.id}/${this.place[0]}`, this.place[1] && { final: 1 });
    if (t !== this.t) return;
    this.values.replaceChildren(...Object.entries(values).flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
  }

  toggle() {
    if (this.timer) return this.pause();
    if (this.t >= this.last) this.t = -1;
    const next = async () => {
      const images = [...this.frames.querySelectorAll("img")];
      if (images.every((image) => image.complete)) await this.show(this.t + 1);
      if (this.t >= this.last) return this.pause();
      this.timer = setTimeout(next, 1000 / (Number(this.rate.value) || 10));
    };
    this.play.textContent = "❚❚";
    this.timer = setTimeout(next, 0);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.play.textContent = "▶";
  }
}

let comparing = false;

const open = guarded(async (row) => {
  if (panes.length && !comparing) close(panes.at(-1), false);
  comparing = false;
  const pane = new Pane(row);
  panes.push(pane);
  at("panes").append(pane.element);
  layOut();
  const found = table.getRows().findIndex((each) => each.getData()._id === row._id);
  if (found >= 0) place = found;
  STATE.set("episode", row._id);
  keep(STATE);
  table.deselectRow();
  table.selectRow(row._id);
  await pane.load();
});

function close(pane, laying = true) {
  pane.pause();
  pane.plots.forEach((plot) => plot.destroy());
  pane.element.remove();
  panes.splice(panes.indexOf(pane), 1);
  if (!panes.length) STATE.delete("episode");
  keep(STATE);
  if (laying) layOut();
}

function layOut() {
  at("panes").hidden = !panes.length;
  document.body.classList.toggle("open", panes.length > 0);
  document.body.classList.toggle("two", panes.length > 1);
  if (panes.length > 1) window.scrollTo(0, 0);
  for (const pane of panes) for (const plot of pane.plots) plot.setSize({ width: Math.max(220, pane.curves.clientWidth - 4), height: 120 });
}

let place = -1; // of the episode that was opened last, among the rows of its page of the table

const step = guarded(async (by) => {
  const now = table.getRows().findIndex((row) => row.getData()._id === panes.at(-1)?.id);
  let next = now >= 0 ? now + by : by > 0 && place >= 0 ? place : Math.max(place, 0) - 1 + (place < 0); // where it left, the next took its place
  if (next < 0 && table.getPage() > 1) { await table.previousPage(); next = table.getRows().length - 1; }
  if (next >= table.getRows().length && table.getPage() < table.getPageMax()) { await table.nextPage(); next = 0; }
  const row = table.getRows()[next];
  if (row) { row.scrollTo("nearest").catch(() => {}); await open(row.getData()); }
});

// Marks

const mark = guarded(async (change) => {
  const pane = panes.at(-1);
  if (!pane || !info.marks || at("episodes").hidden) return;
  const body = JSON.stringify({ episodes: [pane.id], ...change });
  const done = await answer(await fetch("marks", { method: "POST", headers: { "Content-Type": "application/json" }, body }));
  if (done.gone) throw new Error(`episode ${pane.id} is not there any more`);
  const labels = new Set(pane.row.mark);
  for (const label of change.remove ?? []) labels.delete(label);
  for (const label of change.add ?? []) labels.add(label);
  pane.row = { ...pane.row, mark: [...labels].sort(), note: change.note ?? pane.row.note };
  pane.showMark();
  version = done.version;
  await table.replaceData();
});

function markOtherwise() {
  const label = prompt("Label (again: away with it)")?.trim(), has = panes.at(-1)?.row.mark?.includes(label);
  if (label) mark(has ? { remove: [label] } : { add: [label] });
}

function annotate() {
  const note = prompt("Note", panes.at(-1)?.row.note ?? "");
  if (note !== null) mark({ note });
}

// Statistics

const showStatistics = guarded(async () => {
  if (at("statistics").hidden) return;
  const report = await ask("statistics");
  at("checked").textContent = report.failure || (report.done ? `All ${report.total} episodes are checked.` : `${report.checked} of ${report.total} episodes are checked`);
  const rows = Object.entries(report.odd).flatMap(([kind, counts]) => Object.entries(counts).filter(([, count]) => count).map(([name, count]) => {
    const row = make("tr"), link = make("a", `${count} episodes`), cell = make("td");
    link.href = "#";
    link.onclick = (event) => { event.preventDefault(); showPart("episodes"); setConditions([`${kind}=${name}`]); };
    cell.append(link);
    row.append(make("td", name), make("td", kind === "nan" ? "NaN or infinite in" : "never changes in"), cell);
    return row;
  }));
  const dead = report.dead.map(({ entries, number, of }) => {
    const row = make("tr");
    row.append(make("td", entries), make("td", "one value in all episodes"), make("td", of > 1 ? `${number} of ${of} entries` : ""));
    return row;
  });
  const checks = make("table");
  checks.append(...rows, ...dead);
  at("checks").replaceChildren(rows.length + dead.length ? checks : make("p", report.done ? "No NaN, no infinity, nothing that never changes." : ""));
  if (report.done && report.rows.length) {
    at("summary").replaceChildren();
    const holder = make("div");
    at("summary").append(holder);
    new Tabulator(holder, { nestedFieldSeparator: false, data: report.rows, layout: "fitDataStretch", columns: Object.keys(report.rows[0]).map((name) => ({ title: name, field: name, hozAlign: name === "entry" ? "left" : "right", formatter: (cell) => told(cell.getValue(), name) })) });
  }
  if (!report.failure) setTimeout(showStatistics, report.done ? 5000 : 500); // others may come
});

function showPart(name) {
  for (const part of ["episodes", "statistics"]) {
    at(part).hidden = part !== name;
    at(`show-${part}`).setAttribute("aria-pressed", String(part === name));
  }
  if (name === "statistics") showStatistics();
}

// Keys

const KEYS = {
  j: () => step(1), k: () => step(-1), g: () => mark({ add: ["good"], remove: ["bad"] }), b: () => mark({ add: ["bad"], remove: ["good"] }),
  u: () => mark({ remove: ["good", "bad"] }), l: () => info.marks && panes.length && markOtherwise(), n: () => info.marks && panes.length && annotate(),
  c: () => { comparing = panes.length === 1; }, " ": () => panes.at(-1)?.toggle(), Escape: () => panes.length && close(panes.at(-1)),
  ArrowRight: (event) => panes.forEach((pane) => pane.show(pane.t + (event.shiftKey ? 10 : 1))),
  ArrowLeft: (event) => panes.forEach((pane) => pane.show(pane.t - (event.shiftKey ? 10 : 1))),
};

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input:not([type=range])") || event.ctrlKey || event.metaKey || event.altKey;
  if (typing || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key](event);
});

at("filter").onsubmit = (event) => {
  event.preventDefault();
  if (at("condition").value.trim()) setConditions([...conditions(), at("condition").value.trim()]);
  at("condition").value = "";
  at("condition").blur(); // so that keys mean the episode again
};
at("show-episodes").onclick = () => showPart("episodes");
at("show-statistics").onclick = () => showPart("statistics");
at("show-keys").onclick = () => { at("keys").hidden = !at("keys").hidden; at("show-keys").setAttribute("aria-expanded", String(!at("keys").hidden)); };
window.addEventListener("resize", layOut);

guarded(async () => {
  at("distributions").open = window.innerWidth > 700;
  info = await ask("info");
  document.title = at("title").textContent = info.title;
  document.body.classList.toggle("unmarked", !info.marks);
  for (const each of document.querySelectorAll(".marking")) each.hidden = !info.marks;
  at("condition").placeholder = `a condition, as length>=20${info.marks ? ", mark!=bad" : ""}`;
  showConditions();
  version = (await ask("version")).version;
  makeTable();
  table.on("tableBuilt", guarded(async () => {
    await showHistograms();
    const wanted = STATE.get("episode");
    if (!wanted) return;
    const [shard, serial] = wanted.includes("-") ? wanted.split("-") : [null, wanted];
    const { data } = await ask("episodes", { where: [`serial=${serial}`, ...(shard === null ? [] : [`shard=${shard}`])] });
    if (data.length) await open(data[0]);
  }));
  setInterval(look, 1000);
})();
