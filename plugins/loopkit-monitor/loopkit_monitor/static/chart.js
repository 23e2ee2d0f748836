// Charts of curves: smoothing, scales, zoom and values under the pointer, shared by all charts of a board.

import { DASH, bytes, count, duration, h, num, percent, save, seldom } from "./dom.js";
import { csv, drawing, saveDrawing } from "./export.js";

const HEIGHT = 200, ENLARGED = 480;
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const UNITS = { value: num, bytes, percent, seconds: duration };
const SECONDS = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
  ...[1, 2, 3, 6, 12, 24, 48, 120, 240, 480, 1200, 2400, 7200].map((hours) => hours * 3600)]; // from one tick of a time to the next
let styles = null;

/** A color of the style sheet, for a canvas. */
export function ink(name) {
  styles ??= getComputedStyle(document.documentElement);
  return styles.getPropertyValue(name).trim() || "#888";
}

/** The last index whose x is not above `x`, or 0. */
function indexAt(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle - 1;
  }
  return low;
}

function nearest(xs, x) {
  const at = indexAt(xs, x);
  return at + 1 < xs.length && xs[at + 1] - x < x - xs[at] ? at + 1 : at;
}

/** Exponential smoothing of the points that are drawn, without a bias at the beginning. */
export function smoothed(values, weight) {
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (!Number.isFinite(value)) return value;
    mean = mean * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return mean / mass;
  });
}

/** What several charts have in common. */
export class Board {
  constructor(data, settings) {
    this.data = data;
    this.settings = settings; // smooth, log, x: kept while the page is open
    this.charts = [];
    this.range = null; // of x, when zoomed
    this.key = `board-${Math.random()}`;
    this.failure = h("p", { class: "notice bad", role: "alert", hidden: true });
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) this.charts.find((chart) => chart.element === entry.target)?.see(entry.isIntersecting);
      this.load();
    }, { rootMargin: "200px" });
    this.onPoints = ({ detail }) => this.mark(detail);
    this.onTheme = () => { styles = null; for (const chart of this.charts) chart.plot?.redraw(false); };
    data.addEventListener("points", this.onPoints);
    window.addEventListener("theme", this.onTheme);
    this.drawSoon = seldom(() => { for (const chart of this.charts) if (chart.stale && chart.seen) chart.draw(); }, 120);
    this.zoomSoon = seldom(() => this.loadZoomed(), 60);
  }

  end() {
    this.observer.disconnect();
    this.data.removeEventListener("points", this.onPoints);
    window.removeEventListener("theme", this.onTheme);
    for (const chart of this.charts) chart.end();
    this.charts = [];
  }

  add(options) {
    const chart = new Chart(this, options);
    this.charts.push(chart);
    this.observer.observe(chart.element);
    return chart.element;
  }

  mark({ id, names }) {
    for (const chart of this.charts) {
      if (chart.curves.some((curve) => curve.run === id && (names === null || names.includes(curve.name)))) chart.stale = true;
    }
    if (names === null) this.zoomed = new Map();
    this.drawSoon();
  }

  set(changes) {
    Object.assign(this.settings, changes);
    if ("x" in changes) { this.range = null; this.zoomed = new Map(); }
    for (const chart of this.charts) chart.build();
  }

  zoomed = new Map();

  /** Show a part of x in all charts, or all of it. */
  zoom(range) {
    if (range && !(range[1] > range[0])) return;
    this.range = range;
    if (!range) this.zoomed = new Map();
    for (const chart of this.charts) chart.draw();
    this.onZoom?.(range);
    if (range) this.zoomSoon();
  }

  /** The curves of the charts that can be seen, by run. */
  #wanted(test) {
    const wanted = new Map();
    for (const chart of this.charts) {
      if (!chart.seen) continue;
      for (const curve of chart.curves) {
        if (test(curve)) wanted.set(curve.run, [...(wanted.get(curve.run) ?? []), curve.name]);
      }
    }
    return [...wanted].map(([run, names]) => [run, [...new Set(names)]]);
  }

  async load() {
    const wanted = this.#wanted((curve) => !this.data.curve(curve.run, curve.name));
    try {
      await Promise.all(wanted.map(([run, names]) => this.data.need(run, names)));
      this.failure.hidden = true;
    } catch (failure) {
      this.failure.hidden = false;
      this.failure.textContent = `The curves could not be read: ${failure.message}.`;
    }
    if (this.range) this.zoomSoon();
  }

  /** Ask again, for what is zoomed to, of the curves that are not whole. */
  async loadZoomed() {
    const range = this.range;
    if (!range) return;
    const wanted = this.#wanted((curve) => {
      const whole = this.data.curve(curve.run, curve.name);
      const have = this.zoomed.get(`${curve.run}\n${curve.name}`);
      return whole && !whole.waiting && whole.total > whole.step.length && have?.range !== range;
    });
    await Promise.all(wanted.map(async ([run, names]) => {
      let [from, to] = range;
      if (this.settings.x !== "step") {
        const curves = names.map((name) => this.data.curve(run, name)).filter((curve) => curve.step.length);
        if (!curves.length) return;
        const at = (curve, x) => indexAt(this.#xs(run, curve), x);
        from = Math.min(...curves.map((curve) => curve.step[at(curve, range[0])]));
        to = Math.max(...curves.map((curve) => curve.step[Math.min(at(curve, range[1]) + 1, curve.step.length - 1)]));
      }
      const margin = Math.max((to - from) * 0.05, 1);
      const found = await this.data.between(run, names, Math.max(from - margin, 0), to + margin).catch(() => new Map());
      if (this.range !== range) return;
      for (const [name, curve] of found) this.zoomed.set(`${run}\n${name}`, { ...curve, range });
    }));
    if (this.range === range) for (const chart of this.charts) if (chart.seen) chart.draw();
  }

  /** The x of a curve's points: steps, seconds since the run began, or epochs and parts of them. */
  #xs(run, curve) {
    if (this.settings.x === "time") {
      const begin = this.data.runs.get(run)?.started ?? 0;
      return curve.time.map((time) => time - begin);
    }
    return this.settings.x === "epoch" ? epochs(curve.step, this.data.details.get(run)?.epochs ?? []) : curve.step;
  }

  /** The points to draw of a curve, with their x. */
  points(curve) {
    const whole = this.data.curve(curve.run, curve.name);
    if (!whole) return null;
    const zoomed = this.range && this.zoomed.get(`${curve.run}\n${curve.name}`);
    const found = zoomed && zoomed.range === this.range ? zoomed : whole;
    return { xs: this.#xs(curve.run, found), values: found.value, total: found.total, waiting: whole.waiting };
  }
}

/** Steps as epochs: `marks` say how many were complete from which step on. An epoch that goes on is as long as the last. */
function epochs(steps, marks) {
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

const AXES = { step: "step", time: "time since the beginning", epoch: "epoch" };

/** Strictly rising xs, as the plot needs them: of several values at one x the last one. */
function distinct(xs, values) {
  const outX = [], outY = [];
  for (let at = 0; at < xs.length; at += 1) {
    const size = outX.length;
    if (size && xs[at] <= outX[size - 1]) outY[size - 1] = values[at];
    else { outX.push(xs[at]); outY.push(values[at]); }
  }
  return [outX, outY];
}

class Chart {
  seen = false;
  stale = true;
  plot = null;

  /** `curves`: `{run, name, label, color, dash}`; of several runs also `runName`, and `part`, what all of them have. */
  constructor(board, { title, curves, unit = "value", log = null }) {
    Object.assign(this, { board, title, curves, unit, log });
    this.format = UNITS[unit];
    this.hidden = new Set();
    this.where = h("span", { class: "where" });
    this.keys = curves.map((curve) => this.#key(curve));
    this.height = HEIGHT;
    this.area = h("div", { class: "plot", css: { height: `${HEIGHT}px` } });
    this.element = h("section", { class: "chart", tabindex: 0, role: "group", on: { keydown: (event) => this.#press(event) } },
      h("h3", {}, h("span", { class: "chart-title" }, title), this.where, this.#more()),
      this.#legend(),
      this.area);
    this.#name();
    this.sizer = new ResizeObserver(() => this.#resize());
    this.sizer.observe(this.area);
  }

  end() {
    this.sizer.disconnect();
    this.plot?.destroy();
  }

  see(seen) {
    this.seen = seen;
    if (seen && (this.stale || !this.plot)) this.draw();
  }

  #key(curve) {
    const value = h("span", { class: "value" });
    const button = h("button", { type: "button", "aria-pressed": "true", title: `${curve.title ?? curve.name}: show or hide`, on: { click: () => this.#toggle([curve]) } },
      swatch(`var(--s${curve.color})`, curve.dash), h("span", { class: "label" }, curve.label), value);
    return { button, value };
  }

  #toggle(curves) {
    const off = curves.some((curve) => !this.hidden.has(curve));
    for (const curve of curves) if (off) this.hidden.add(curve); else this.hidden.delete(curve);
    this.keys.forEach(({ button }, at) => button.setAttribute("aria-pressed", String(!this.hidden.has(this.curves[at]))));
    this.build();
  }

  /** The keys in a row; of several runs with several curves each, a table: the color is the run's, the dash the curve's. */
  #legend() {
    const [runs, parts] = ["run", "part"].map((key) => [...new Set(this.curves.map((curve) => curve[key]))]);
    if (runs.length < 2 || parts.length < 2) return h("ul", { class: "keys" }, this.keys.map(({ button }) => h("li", {}, button)));
    const group = (key, value, text, mark) => h("button", { type: "button", title: `${text}: show or hide all`, on: { click: () => this.#toggle(this.curves.filter((curve) => curve[key] === value)) } }, mark, h("span", { class: "label" }, text));
    const of = (key, value) => this.curves.find((curve) => curve[key] === value);
    return h("table", { class: "keys legend" },
      h("thead", {}, h("tr", {}, h("td", {}), parts.map((part) => h("th", { scope: "col" }, group("part", part, part, swatch("currentColor", of("part", part).dash)))))),
      h("tbody", {}, runs.map((run) => h("tr", {}, h("th", { scope: "row" }, group("run", run, of("run", run).runName, swatch(`var(--s${of("run", run).color})`, 0))),
        parts.map((part) => h("td", {}, this.keys[this.curves.findIndex((curve) => curve.run === run && curve.part === part)]?.button))))));
  }

  /** What else can be done with a chart. */
  #more() {
    const button = (text, what) => h("button", { type: "button", on: { click: () => { more.open = false; what(); } } }, text);
    const larger = button("Enlarge", () => this.#enlarge(larger));
    const more = h("details", { class: "more", on: { keydown: (event) => { if (event.key === "Escape") more.open = false; } } },
      h("summary", { "aria-label": `More of ${this.title}` }, "\u22ef"),
      h("div", {}, larger, ["PNG", "SVG", "CSV"].map((form) => button(`Save as ${form}`, () => this.save(form.toLowerCase())))));
    return more;
  }

  #enlarge(button) {
    const large = this.element.classList.toggle("large");
    this.height = large ? ENLARGED : HEIGHT;
    this.area.style.height = `${this.height}px`;
    button.textContent = large ? "As small as the others" : "Enlarge";
    this.build();
    this.element.scrollIntoView({ block: "nearest" });
  }

  /** Save what is shown: "png", "svg", or "csv" of its points. */
  async save(form) {
    const { plot, board } = this, x = board.settings.x;
    if (!plot) return;
    const shown = this.curves.map((curve, at) => ({ curve, ...this.shown[at] })).filter((each) => each.x?.length);
    if (form === "csv") {
      const rows = shown.flatMap(({ curve, x: xs, raw, soft }) => xs.map((each, i) => [curve.run, curve.name, each, raw[i], ...(board.settings.smooth ? [soft[i]] : [])]));
      save(`${this.title}.csv`, "text/csv", csv([["run", "name", x, "value", ...(board.settings.smooth ? ["smoothed"] : [])], ...rows]));
      return;
    }
    const box = { left: plot.over.offsetLeft, top: plot.over.offsetTop, width: plot.over.clientWidth, height: plot.over.clientHeight };
    const pixel = (value, along) => plot.valToPos(value, along) + (along === "x" ? box.left : box.top);
    const ticks = (axis, along) => (axis._splits ?? []).map((value, i) => ({ at: pixel(value, along), label: axis._values[i] ?? "" })).filter(({ at, label }) => label !== "" && Number.isFinite(at));
    const lines = shown.flatMap(({ curve, x: xs, raw, soft }) => {
      const line = (values, about) => ({ label: "", color: ink(`--s${curve.color}`), dash: DASHES[curve.dash ?? 0], width: 1.5, ...about,
        points: values.map((value, i) => (Number.isFinite(value) && !(this.isLog && value <= 0) ? [pixel(xs[i], "x"), pixel(value, "y")] : null)) });
      const label = { label: curve.label };
      return board.settings.smooth ? [line(raw, { color: `${ink(`--s${curve.color}`)}45` }), line(soft, label)] : [line(raw, label)];
    });
    await saveDrawing(drawing({ title: this.title, width: plot.width, height: plot.height, box, lines, ink,
      ticks: { x: ticks(plot.axes[0], "x"), y: ticks(plot.axes[1], "y"), name: AXES[x] } }), this.title, form);
  }

  #name() {
    this.element.setAttribute("aria-label", `${this.title}. Arrow keys move the cursor, plus and minus zoom, 0 shows all.`);
  }

  #press(event) {
    const plot = this.plot;
    if (!plot || event.target !== this.element || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = plot.scales.x;
    const width = max - min, here = this.at ?? (min + max) / 2;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const xs = plot.data[0], by = width / (event.shiftKey ? 10 : 100);
      this.#point((event.key === "ArrowLeft" ? xs.findLast((x) => x <= here - by) : xs.find((x) => x >= here + by)) ?? (event.key === "ArrowLeft" ? min : max));
    } else if (event.key === "+" || event.key === "=") this.board.zoom([here - width / 4, here + width / 4]);
    else if (event.key === "-") this.board.zoom([min - width / 2, max + width / 2]);
    else if (event.key === "0") this.board.zoom(null);
    else if (event.key === "Escape") plot.setCursor({ left: -10, top: -10 });
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #point(x) {
    const { min, max } = this.plot.scales.x;
    this.plot.setCursor({ left: this.plot.valToPos(Math.min(Math.max(x, min), max), "x"), top: this.height / 3 });
  }

  #resize() {
    const width = Math.floor(this.area.clientWidth);
    if (!width) return;
    if (this.plot) { if (this.plot.width !== width) this.plot.setSize({ width, height: this.height }); }
    else if (this.seen) this.draw();
  }

  build() {
    this.plot?.destroy();
    this.plot = null;
    this.stale = true;
    if (this.seen) this.draw();
  }

  get isLog() { return this.log ?? this.board.settings.log; }

  draw() {
    if (!this.seen) { this.stale = true; return; }
    this.stale = false;
    const { smooth } = this.board.settings;
    this.shown = this.curves.map((curve) => (this.hidden.has(curve) ? null : this.board.points(curve)));
    const waiting = this.shown.every((points) => !points || points.waiting);
    const loading = waiting && this.hidden.size < this.curves.length;
    this.area.classList.toggle("waiting", loading);
    if (loading && !this.plot) return;
    this.odd = [];
    const tables = [];
    this.shown.forEach((points, at) => {
      const xs = points?.xs ?? [], values = points?.values ?? [];
      const [x, raw] = distinct(xs, values);
      const soft = smooth ? smoothed(raw, smooth) : raw;
      const fit = (value) => (!Number.isFinite(value) ? null : this.isLog && value <= 0 ? undefined : value); // null is a gap
      raw.forEach((value, i) => { if (!Number.isFinite(value)) this.odd.push([x[i], value, at]); });
      tables.push([x, raw.map(fit), soft.map(fit)]);
      if (points) Object.assign(points, { x, raw, soft });
    });
    const joined = tables.some(([x]) => x.length) ? uPlot.join(tables) : [[], ...tables.flatMap(() => [[], []])];
    if (this.plot) this.plot.setData(joined);
    else this.#make(joined);
    this.#values();
  }

  #make(joined) {
    const width = Math.floor(this.area.clientWidth);
    if (!width) return;
    const { board } = this;
    const { smooth, x } = board.settings;
    const stroke = (curve, faint) => () => ink(`--s${curve.color}`) + (faint ? "45" : "");
    const series = [{}];
    this.curves.forEach((curve, at) => {
      const about = { dash: DASHES[curve.dash ?? 0], spanGaps: false };
      const few = () => this.#few(at);
      series.push({ ...about, stroke: stroke(curve, smooth > 0), width: smooth ? 1 : 1.5, points: { size: 5, show: few, fill: stroke(curve, smooth > 0) } });
      series.push({ ...about, stroke: stroke(curve, false), width: 1.75, show: smooth > 0, points: { show: false } });
    });
    const axis = { stroke: () => ink("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: () => ink("--grid"), width: 1 };
    const ticks = x === "time" ? (_, values) => values.map(clock) : (_, values) => values.map((value) => (value % 1 ? (x === "epoch" ? String(Number(value.toPrecision(6))) : "") : stepTick(value)));
    this.plot = new uPlot({
      width, height: this.height, padding: [8, 18, 0, 0], pxAlign: 1,
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => board.range ?? (low === null ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high]) },
        y: {
          distr: this.isLog ? 3 : 1,
          range: (_, low, high) => {
            if (low === null || low === undefined) return this.isLog ? [0.1, 1] : [0, 1];
            if (this.isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
            if (this.unit === "percent" && low >= 0 && high <= 100) return [0, Math.max(high * 1.1, 10)];
            const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
            return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
          },
        },
      },
      axes: [
        { ...axis, grid: { show: false }, size: 22, gap: 4, space: 64, values: ticks, ...(x === "time" ? { incrs: SECONDS } : {}), label: AXES[x], labelFont: axis.font, labelSize: 15, labelGap: 0 },
        { ...axis, grid, size: 52, gap: 5, space: 32, ...(this.unit === "seconds" && !this.isLog ? { incrs: SECONDS } : {}), values: (_, values) => values.map((value) => (value === null ? "" : tick(value, this.unit, this.format))) },
      ],
      cursor: {
        y: false,
        points: { size: 7, fill: (plot, at) => ink(`--s${this.curves[(at - 1) >> 1]?.color ?? 0}`), width: 0 },
        drag: { x: true, y: false, setScale: false, dist: 4 },
        sync: { key: board.key, setSeries: false, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => { board.zoom(null); return null; } },
      },
      series,
      hooks: {
        setSelect: [(plot) => {
          const { left, width: size } = plot.select;
          if (size < 4) return;
          const range = [plot.posToVal(left, "x"), plot.posToVal(left + size, "x")];
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          board.zoom(range);
        }],
        setCursor: [(plot) => {
          const { left } = plot.cursor;
          this.at = left === null || left === undefined || left < 0 ? null : plot.posToVal(left, "x");
          this.#values();
        }],
        draw: [(plot) => this.#drawOdd(plot)],
      },
    }, joined, this.area);
  }

  /** Whether a curve has so few points in sight that each is marked. */
  #few(at) {
    const xs = this.shown?.[at]?.x ?? [], { min, max } = this.plot?.scales.x ?? {};
    if (!xs.length || !(max > min)) return true;
    return indexAt(xs, max) - indexAt(xs, min) < this.area.clientWidth / 14;
  }

  /** Marks at the upper edge where a curve is infinite or undefined. */
  #drawOdd(plot) {
    if (!this.odd.length) return;
    const { ctx, bbox } = plot, size = 4 * devicePixelRatio;
    ctx.save();
    for (const [x, , at] of this.odd.slice(-500)) {
      const left = plot.valToPos(x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.fillStyle = ink(`--s${this.curves[at].color}`);
      ctx.beginPath();
      ctx.moveTo(left - size, bbox.top);
      ctx.lineTo(left + size, bbox.top);
      ctx.lineTo(left, bbox.top + 1.6 * size);
      ctx.fill();
    }
    ctx.restore();
  }

  /** The values at the cursor, or the last ones. */
  #values() {
    const { smooth, x } = this.board.settings;
    const { min, max } = this.plot?.scales.x ?? {};
    const here = this.at ?? null;
    let where = null;
    this.curves.forEach((curve, at) => {
      const { x: xs = [], raw, soft } = this.shown?.[at] ?? {};
      let text = "";
      if (xs.length) {
        const index = here === null ? xs.length - 1 : nearest(xs, here);
        const apart = Math.max((xs[xs.length - 1] - xs[0]) / Math.max(xs.length - 1, 1), (max - min) / 50);
        const inside = here === null || Math.abs(xs[index] - here) <= apart; // a curve that ends before has no value here
        text = inside ? this.format((smooth ? soft : raw)[index]) : DASH;
        if (here !== null && inside && (where === null || Math.abs(xs[index] - here) < Math.abs(where - here))) where = xs[index];
      }
      this.keys[at].value.textContent = text;
    });
    this.where.textContent = where === null ? "" : x === "time" ? duration(where) : x === "epoch" ? `epoch ${num(where)}` : `step ${count(where)}`;
  }
}

const swatch = (color, dash) => h("span", { class: "swatch", css: { "border-top": `2px ${dash ? "dashed" : "solid"} ${color}` } });

const stepTick = (value) => (value >= 1e4 ? `${Number((value / (value >= 1e6 ? 1e6 : 1e3)).toPrecision(4))}${value >= 1e6 ? " M" : " k"}` : count(value));

/** A time on an axis: `20 s`, `8:20`, `2:30:00`. */
function clock(value) {
  if (!(value >= 60)) return duration(value).replace(".0 ", " ");
  const whole = Math.round(value), two = (part) => String(part).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

function tick(value, unit, format) {
  if (unit === "seconds") return value < 0 ? "" : clock(value);
  if (unit !== "value") return unit === "percent" ? `${Number(value.toPrecision(3))} %` : value < 0 ? "" : format(value);
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  return size >= 1e3 ? num(value) : String(Number(value.toPrecision(4)));
}

