// Charts of curves: smoothing, scales, zoom and the cursor, shared by all charts of a board.

import { button, h, popover, save, seldom } from "./dom.js";
import { csv, drawing, saveDrawing } from "./export.js";
import { DASHES, Plot, indexAt, ink } from "./plot.js";
import { rangeText } from "./state.js";

const HEIGHT = 220, ENLARGED = 480, PHONE = 200;
const GRID = 200; // places at which runs of a group are averaged
const AXES = { step: "step", time: "time since the beginning", epoch: "epoch" };
const MANY = 30; // curves from which on lines are thinner

/** What several charts have in common. `look()` gives `{smooth, x, logx, logy, range, band, talls}`; `change(changes)` asks for others;
 * `near(key)` is told of which curve the pointer is near. */
export class Board {
  constructor(data, look, change, near = () => {}) {
    Object.assign(this, { data, look, change, near, highlighted: null, charts: [], zoomed: new Map(), runs: 1 });
    this.failure = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.note = h("p", { class: "muted", role: "status", hidden: true });
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) this.charts.find((chart) => chart.element === entry.target)?.see(entry.isIntersecting);
      this.loadSoon();
    }, { rootMargin: "200px" });
    this.onPoints = ({ detail }) => this.mark(detail);
    this.onTheme = () => { for (const chart of this.charts) if (chart.seen) chart.draw(); };
    data.addEventListener("points", this.onPoints);
    window.addEventListener("theme", this.onTheme);
    this.drawSoon = seldom(() => { for (const chart of this.charts) if (chart.stale && chart.seen) chart.draw(); }, 60);
    this.highlightSoon = seldom(() => { for (const chart of this.charts) if (chart.seen) chart.plot.highlight(this.highlighted); }, 20);
    this.loadSoon = seldom(() => this.load(), 20);
    this.zoomSoon = seldom(() => this.loadZoomed(), 40);
  }

  end() {
    this.observer.disconnect();
    this.data.removeEventListener("points", this.onPoints);
    window.removeEventListener("theme", this.onTheme);
    for (const chart of this.charts) chart.end();
    this.charts = [];
  }

  /** Show these charts, `{key, title, unit, curves}`; those that are there already are kept. Returns their elements. */
  show(wanted) {
    const known = new Map(this.charts.map((chart) => [chart.key, chart]));
    this.charts = wanted.map((each) => {
      const chart = known.get(each.key) ?? new Chart(this, each);
      if (known.delete(each.key)) chart.change(each); else this.observer.observe(chart.element);
      return chart;
    });
    for (const chart of known.values()) { this.observer.unobserve(chart.element); chart.end(); }
    this.runs = new Set(wanted.flatMap((each) => each.curves.map((curve) => curve.run))).size;
    this.loadSoon();
    return this.charts.map((chart) => chart.element);
  }

  mark({ id, names }) {
    for (const chart of this.charts) {
      if (chart.curves.some((curve) => curve.run === id && (names === null || names.includes(curve.name)))) chart.stale = true;
    }
    if (names === null) this.zoomed.clear();
    this.drawSoon();
    this.loadSoon();
  }

  /** The look has changed. */
  refresh() {
    this.zoomed.clear();
    for (const chart of this.charts) { if (chart.seen) chart.draw(); else chart.stale = true; }
    this.loadSoon();
  }

  zoom(range) {
    if (range && !(range[1] > range[0])) return;
    this.change({ range });
    for (const chart of this.charts) { if (chart.seen) chart.draw(); else chart.stale = true; }
    if (range) this.zoomSoon();
  }

  /** Draw the curves of one run, or group, above the others; null for none. */
  highlight(key) {
    this.highlighted = key;
    this.highlightSoon();
  }

  /** The vertical range of a chart: null for that of its curves. */
  tall(key, range) {
    const others = this.look().talls.filter((each) => !each.startsWith(`${key}=`));
    this.change({ tall: { tall: range ? [...others, `${key}=${rangeText(range)}`] : others } });
    this.refresh();
  }

  tallOf(key) {
    const [low, high] = (this.look().talls?.find((each) => each.startsWith(`${key}=`)) ?? "=").slice(key.length + 1).split("..").map(Number);
    return high > low ? [low, high] : null;
  }

  cursor(x, from, top = null) {
    for (const chart of this.charts) if (chart.seen) chart.plot.cursor(x, chart.plot === from, chart.plot === from ? top : null);
  }

  #wanted(test) {
    const made = [];
    for (const chart of this.charts) if (chart.seen) for (const curve of chart.curves) if (test(curve)) made.push([curve.run, curve.name]);
    return made;
  }

  async load() {
    const { smooth } = this.look(), points = this.data.pointsFor(this.runs);
    const wanted = this.#wanted((curve) => !this.data.has(curve.run, curve.name, smooth, points));
    try {
      if (wanted.length) await this.data.need(wanted, smooth, this.runs);
      this.failure.hidden = true;
    } catch (failure) {
      this.failure.hidden = false;
      this.failure.replaceChildren(`The curves could not be read: ${failure.message}. `, button({}, () => this.load(), "Try again"));
    }
    if (this.look().range) this.zoomSoon();
  }

  /** Ask again, for what is zoomed to, of the curves that are not whole. */
  async loadZoomed() {
    const { range, x, smooth } = this.look();
    if (!range) return;
    const key = `${range}`, byRun = new Map();
    for (const [run, name] of this.#wanted((curve) => {
      const whole = this.data.curve(curve.run, curve.name);
      return whole && !whole.waiting && whole.total > whole.step.length && this.zoomed.get(`${curve.run}\n${curve.name}`)?.key !== `${key} ${smooth}`;
    })) byRun.set(run, [...(byRun.get(run) ?? []), name]);
    await Promise.all([...byRun].map(async ([run, names]) => {
      let [from, to] = range;
      if (x !== "step") {
        const curves = names.map((name) => this.data.curve(run, name)).filter((curve) => curve.step.length);
        if (!curves.length) return;
        const at = (curve, place) => indexAt(this.xs(run, curve), place);
        from = Math.min(...curves.map((curve) => curve.step[at(curve, range[0])]));
        to = Math.max(...curves.map((curve) => curve.step[Math.min(at(curve, range[1]) + 1, curve.step.length - 1)]));
      }
      const margin = Math.max((to - from) * 0.05, 1);
      const found = await this.data.between(run, [...new Set(names)], Math.max(from - margin, 0), to + margin, smooth, this.data.pointsFor(this.runs)).catch(() => new Map());
      for (const [name, curve] of found) this.zoomed.set(`${run}\n${name}`, { ...curve, key: `${key} ${smooth}` });
    }));
    if (`${this.look().range}` === key && byRun.size) for (const chart of this.charts) if (chart.seen) chart.draw();
  }

  /** The x of a curve's points: steps, seconds since the run began, or epochs and parts of them. */
  xs(run, curve) {
    const { x } = this.look();
    if (x === "time") {
      const begin = this.data.runs.get(run)?.started ?? 0;
      return curve.time.map((time) => time - begin);
    }
    return x === "epoch" ? epochsOf(curve.step, this.data.runs.get(run), this.data.details.get(run)?.epochs ?? []) : curve.step;
  }

  /** The points to draw of a curve, with their x, and those of its mean. */
  points(curve) {
    const whole = this.data.curve(curve.run, curve.name);
    if (!whole) return null;
    const { range, smooth } = this.look(), zoomed = range && this.zoomed.get(`${curve.run}\n${curve.name}`);
    const found = zoomed?.key === `${range} ${smooth}` ? zoomed : whole;
    const soft = smooth && found.smooth;
    return { waiting: whole.waiting && !whole.step.length, exact: whole.exact !== false, raw: distinct(this.xs(curve.run, found), found.value), soft: soft ? distinct(this.xs(curve.run, soft), soft.value) : null };
  }
}

/** Steps as epochs: as long as planned, or by `marks`, which say how many were complete at which step. */
function epochsOf(steps, run, marks) {
  const each = run?.planned_epochs && run.total_steps ? run.total_steps / run.planned_epochs : 0;
  if (each >= 1) return steps.map((step) => step / each);
  const known = marks.length && marks[0][1] > 0 && marks[0][0] > 0 ? [[0, 0], ...marks] : marks;
  if (known.length < 2) return steps.map(() => known[0]?.[0] ?? 0);
  let at = 0;
  return steps.map((step) => {
    while (at > 0 && known[at][1] > step) at -= 1;
    while (at + 1 < known.length && known[at + 1][1] <= step) at += 1;
    const [from, to] = at + 1 < known.length ? [known[at], known[at + 1]] : [known[at - 1], known[at]];
    const part = ((step - known[at][1]) / Math.max(to[1] - from[1], 1)) * (to[0] - from[0]);
    return known[at][0] + (at + 1 < known.length ? part : Math.min(part, 1));
  });
}

/** Strictly rising x: of several values at one x the last one. */
function distinct(xs, values) {
  let rises = true;
  for (let at = 1; at < xs.length && rises; at += 1) rises = xs[at] > xs[at - 1];
  if (rises) return { x: xs, y: values };
  const made = { x: [], y: [] };
  for (let at = 0; at < xs.length; at += 1) {
    const size = made.x.length;
    if (size && xs[at] <= made.x[size - 1]) made.y[size - 1] = values[at];
    else { made.x.push(xs[at]); made.y.push(values[at]); }
  }
  return made;
}

/** The mean of several curves, and a band: their standard deviation, or from the lowest to the highest. */
export function average(curves, band) {
  const filled = curves.filter((curve) => curve.x.length);
  if (!filled.length) return { x: [], mean: [], low: [], high: [] };
  const from = Math.min(...filled.map((curve) => curve.x[0])), to = Math.max(...filled.map((curve) => curve.x[curve.x.length - 1]));
  const places = [...new Set(filled.flatMap((curve) => curve.x))];
  const x = places.length <= GRID ? places.sort((a, b) => a - b) : Array.from({ length: GRID }, (_, at) => from + ((to - from) * at) / (GRID - 1));
  const made = { x, mean: [], low: [], high: [] };
  for (const at of x) {
    const values = filled.map((curve) => between(curve, at)).filter(Number.isFinite);
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length);
    made.mean.push(mean);
    made.low.push(band === "range" ? Math.min(...values) : mean - spread);
    made.high.push(band === "range" ? Math.max(...values) : mean + spread);
  }
  return made;
}

/** A curve at an x between two of its points; nothing outside of them. */
function between({ x, y }, at) {
  if (at < x[0] || at > x[x.length - 1]) return NaN;
  const left = indexAt(x, at), right = Math.min(left + 1, x.length - 1);
  if (x[left] === at || left === right) return y[left];
  return y[left] + ((y[right] - y[left]) * (at - x[left])) / (x[right] - x[left]);
}

const phone = globalThis.matchMedia?.("(max-width: 800px)") ?? { matches: false };

class Chart {
  seen = false;
  stale = true;
  at = null;

  /** `curves`: `{run, name, label, color, dash, group}`; those of one group are averaged. */
  constructor(board, options) {
    this.board = board;
    this.key = options.key;
    this.height = phone.matches ? PHONE : HEIGHT;
    this.plot = new Plot(options.title, this.height, { zoom: (range) => board.zoom(range), cursor: (x, plot, top) => { this.at = x; board.cursor(x, plot, top); }, near: (key) => board.near(key) });
    this.legend = h("p", { class: "keys" });
    this.state = h("span", { class: "where" });
    this.more = popover("\u22ef", (close) => this.#menu(close), { class: "quiet small", "aria-label": `More of ${options.title}` });
    this.head = h("h2", {}, h("span", { class: "chart-title", title: options.title }, options.title), this.state, this.more.element);
    this.element = h("section", { class: "chart", "aria-label": options.title }, this.head, this.legend, this.plot.element);
    this.plot.layer.tabIndex = 0;
    this.plot.layer.removeAttribute("aria-hidden");
    this.plot.layer.setAttribute("role", "application");
    this.plot.layer.setAttribute("aria-label", `${options.title}: arrow keys move the cursor, plus and minus zoom, 0 shows all`);
    this.plot.layer.addEventListener("keydown", (event) => this.#press(event));
    this.change(options);
  }

  change({ title, unit = "value", curves, marks = [] }) {
    Object.assign(this, { title, unit, curves, marks, stale: true });
    if (this.seen) this.board.drawSoon();
  }

  end() { this.plot.end(); }

  see(seen) {
    this.seen = seen;
    if (seen && this.stale) this.draw();
  }

  #menu(close) {
    const entry = (text, what) => button({}, () => { close(); what(); }, text);
    const large = this.element.classList.contains("large");
    return [this.#tallMenu(close), entry(large ? "As small as the others" : "Enlarge", () => this.#enlarge()), ["PNG", "SVG", "CSV"].map((form) => entry(`Save as ${form}`, () => this.save(form.toLowerCase())))].flat();
  }

  /** Choose the vertical range: as typed, without the highest and the lowest 2 % of the values, or of all. */
  #tallMenu(close) {
    const { board, key, plot } = this, values = () => (plot.what?.series ?? []).flatMap((each) => (each.faint ? [] : each.y.filter(Number.isFinite))).sort((a, b) => a - b);
    const field = (name, value = 0) => h("input", { inputmode: "decimal", "aria-label": name, value: Number(value.toPrecision(4)) });
    const from = field("Lowest value shown", plot.y?.low), to = field("Highest value shown", plot.y?.high);
    const set = (...range) => { close(); board.tall(key, range.length ? range : null); };
    return h("form", { class: "tall", on: { submit: (event) => { event.preventDefault(); set(Number(from.value), Number(to.value)); } } },
      h("h4", {}, "Vertical range"), h("div", {}, from, "to", to, h("button", { type: "submit", class: "small" }, "Set")),
      h("div", {}, button({ class: "small" }, () => { const all = values(); set(...[0.02, 0.98].map((part) => all[Math.round(part * (all.length - 1))] ?? 0)); }, "Without outliers"), board.tallOf(key) ? button({ class: "small" }, () => set(), "All") : null));
  }

  #enlarge() {
    this.height = this.element.classList.toggle("large") ? ENLARGED : phone.matches ? PHONE : HEIGHT;
    this.plot.resize(this.height);
    this.element.scrollIntoView({ block: "nearest" });
  }

  #press(event) {
    const { plot, board } = this;
    if (!plot.x || event.ctrlKey || event.metaKey || event.altKey) return;
    const { low, high } = plot.x, width = high - low, here = this.at ?? (low + high) / 2;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const xs = [...new Set(plot.what.series.flatMap((each) => (each.faint ? [] : each.x)))].sort((a, b) => a - b), by = width / (event.shiftKey ? 10 : 100);
      const to = event.key === "ArrowLeft" ? xs.findLast((x) => x <= here - by) ?? low : xs.find((x) => x >= here + by) ?? high;
      this.at = Math.min(Math.max(to, low), high);
      board.cursor(this.at, plot);
    } else if (event.key === "+" || event.key === "=") board.zoom([here - width / 4, here + width / 4]);
    else if (event.key === "-") board.zoom([low - width / 2, high + width / 2]);
    else if (event.key === "0") board.zoom(null);
    else if (event.key === "Escape" && this.at !== null) { this.at = null; board.cursor(null, null); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  draw() {
    if (!this.seen) { this.stale = true; return; }
    this.stale = false;
    const { board } = this, { smooth, x, logx, logy, range, band } = board.look();
    const found = this.curves.map((curve) => [curve, board.points(curve)]);
    const ready = found.filter(([, points]) => points && !points.waiting);
    this.element.classList.toggle("waiting", !ready.length && this.curves.length > 0);
    this.state.textContent = ready.some(([, points]) => !points.exact) ? "a sample; all points are being read" : "";
    const series = [], bands = [], groups = new Map(), many = ready.length > MANY;
    for (const [curve, points] of ready) {
      if (curve.group !== undefined) { groups.set(curve.group, [...(groups.get(curve.group) ?? []), [curve, points]]); continue; }
      const about = { color: curve.color, dash: curve.dash, label: curve.label, key: curve.key };
      if (points.soft) {
        series.push({ ...about, ...points.raw, faint: true, alpha: 0.25, width: 1 });
        series.push({ ...about, ...points.soft, width: 1.75, raw: (place) => between(points.raw, place), curve, from: points });
      } else series.push({ ...about, ...points.raw, width: many ? 1 : 1.5, alpha: many ? 0.6 : 1, curve, from: points });
    }
    for (const members of groups.values()) {
      const [{ color, dash, key, groupLabel: label }] = members[0], made = average(members.map(([, points]) => points.soft ?? points.raw), band);
      bands.push({ x: made.x, low: made.low, high: made.high, color, key });
      series.push({ x: made.x, y: made.mean, color, dash, label, key, width: 2 });
    }
    this.#keys(series);
    const marks = this.marks.flatMap((mark) => {
      const at = board.xs(mark.run, { step: [mark.step], time: [mark.time ?? 0] })[0];
      return x === "time" && !mark.time ? [] : [{ ...mark, x: at, y: mark.value }];
    });
    this.plot.set({ series: series.sort((a, b) => Boolean(b.faint) - Boolean(a.faint)), bands, marks, range, tall: board.tallOf(this.key), focus: board.highlighted, logx, logy, unit: this.unit, along: x, title: AXES[x] });
  }

  /** Which dash, or which color, is what: one short line. */
  #keys(series) {
    const parts = new Map(series.filter((each) => !each.faint).map((each) => [each.curve?.part ?? each.label, each]));
    const several = new Set(this.curves.map((curve) => curve.run)).size > 1;
    const shown = parts.size > 1 && parts.size <= 8 ? [...parts] : [];
    const text = shown.map(([name, each]) => `${name}${each.dash}${each.color}`).join();
    if (text === this.keyed) return;
    this.keyed = text;
    this.legend.replaceChildren(...shown.map(([name, each]) => h("span", { on: several && !each.curve?.part ? { pointerenter: () => this.board.near(each.key), pointerleave: () => this.board.near(null) } : {} }, h("span", { class: "swatch", css: { "border-top": `2px ${each.dash ? "dashed" : "solid"} ${several && each.curve?.part ? "currentColor" : `var(${each.color})`}` } }), name)));
    this.legend.hidden = !shown.length;
  }

  /** Save what is shown: "png", "svg", or "csv" of its points. */
  async save(form) {
    const { plot, board } = this, { x, smooth } = board.look();
    if (!plot.what?.series.length) return;
    if (form === "csv") {
      const rows = plot.what.series.flatMap((each) => (each.faint ? [] : each.x.map((at, i) => [each.curve?.run ?? each.label, each.curve?.name ?? this.title, at, each.raw ? each.raw(at) : each.y[i], ...(smooth ? [each.y[i]] : [])])));
      save(`${this.title}.csv`, "text/csv", csv([["run", "name", x, "value", ...(smooth ? ["smoothed"] : [])], ...rows]));
      return;
    }
    const { x: across, y: up } = plot.ticks();
    const box = { left: plot.x.to(plot.x.low), top: plot.y.to(plot.y.high), width: plot.x.to(plot.x.high) - plot.x.to(plot.x.low), height: plot.y.to(plot.y.low) - plot.y.to(plot.y.high) };
    const lines = plot.what.series.map((each) => ({ label: each.faint ? "" : each.label, color: ink(each.color), opacity: each.alpha ?? 1, dash: DASHES[each.dash ?? 0], width: each.width ?? 1.5, points: plot.path(each) }));
    await saveDrawing(drawing({ title: this.title, width: plot.width, height: plot.height, box, lines, ink,
      ticks: { x: across.map(([at, label]) => ({ at: plot.x.to(at), label })), y: up.map(([at, label]) => ({ at: plot.y.to(at), label })), name: AXES[x] } }), this.title, form);
  }
}
