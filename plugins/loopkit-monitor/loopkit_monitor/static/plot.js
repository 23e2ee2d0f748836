// A plot of curves on a canvas: scales, ticks, lines, bands, marks, a cursor that shows values in a box, and zoom.

import { bytes, count, duration, h, num, percent } from "./dom.js";

export const UNITS = { value: num, bytes, percent, seconds: duration };
export const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const MARGIN = { left: 56, right: 14, top: 8, bottom: 36 };
const FONT_OF_TICKS = "11px system-ui, sans-serif";
const NEAR = 16; // pixels from the pointer to a curve that is drawn above the others
const MOST_IN_BOX = 12; // curves whose values the box at the cursor shows
const SECONDS_STEPS = [1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
  ...[1, 2, 3, 6, 12, 24, 48, 120, 240, 480, 1200, 2400, 7200].map((hours) => hours * 3600)];
let styles = null;
if (globalThis.window) window.addEventListener("theme", () => { styles = null; });

/** A color of the style sheet, for a canvas. */
export function ink(name) {
  styles ??= getComputedStyle(document.documentElement);
  return styles.getPropertyValue(name).trim() || "#888";
}

/** The last index whose x is not above `x`, or 0. */
export function indexAt(xs, x) {
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

/** Round places between two values, about so many. */
export function linearTicks(low, high, most, steps = null) {
  const rough = (high - low) / Math.max(most, 1), size = 10 ** Math.floor(Math.log10(rough));
  const step = steps?.find((each) => each >= rough) ?? size * ([1, 2, 5, 10].find((each) => each * size >= rough * 0.999) ?? 10);
  const made = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9 && made.length < 100; at += 1) made.push(Number((at * step).toPrecision(12)));
  return made;
}

/** Powers of ten between two positive values; where there are few, also their double and fivefold. */
export function logTicks(low, high, most = 10) {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.max(Math.ceil((to - from) / most), 1);
  const made = [], inside = (value) => value >= low * 0.999 && value <= high * 1.001;
  const powers = [];
  for (let power = from; power <= to; power += 1) if (inside(10 ** power)) powers.push(power);
  for (let power = from; power <= to; power += 1) {
    for (const factor of powers.length < 3 ? [1, 2, 5] : [1]) if ((factor > 1 || power % every === 0) && inside(factor * 10 ** power)) made.push(Number((factor * 10 ** power).toPrecision(6)));
  }
  return made.length ? made : [low, high];
}

/** A scale from values to pixels. */
function scale(low, high, begin, end, log) {
  const bend = log ? Math.log10 : (value) => value, unbend = log ? (value) => 10 ** value : (value) => value;
  const from = bend(low), size = bend(high) - from || 1;
  return { low, high, log, to: (value) => begin + ((bend(value) - from) / size) * (end - begin), from: (pixel) => unbend(from + ((pixel - begin) / (end - begin)) * size) };
}

/** A time on an axis: `20 s`, `8:20`, `2:30:00`. */
function clock(value) {
  if (!(value >= 60)) return duration(value).replace(".0 ", " ");
  const whole = Math.round(value), two = (part) => String(part).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

export function tick(value, unit) {
  if (unit === "seconds") return value < 0 ? "" : clock(value);
  if (unit === "percent") return `${Number(value.toPrecision(3))} %`;
  if (unit === "bytes") return value < 0 ? "" : bytes(value);
  const size = Math.abs(value);
  if (size >= 1e6 && value % 1e5 === 0) return `${Number((value / 1e6).toPrecision(4))} M`;
  if (size >= 1e4 && value % 100 === 0) return `${Number((value / 1e3).toPrecision(4))} k`;
  return num(Number(value.toPrecision(6)));
}

export class Plot {
  /** `on.zoom(range)`, `on.cursor(x, plot)`, `on.near(key)`; `name` is for readers that do not see. */
  constructor(name, height, on) {
    this.height = height;
    this.on = on;
    this.canvas = h("canvas", { role: "img", "aria-label": name });
    this.layer = h("canvas", { class: "layer", "aria-hidden": "true" });
    this.box = h("div", { class: "values", hidden: true });
    this.element = h("div", { class: "plot", css: { height: `${height}px` } }, this.canvas, this.layer, this.box);
    this.what = null;
    this.at = null;
    this.layer.addEventListener("pointerdown", (event) => this.#press(event));
    this.layer.addEventListener("pointermove", (event) => this.#move(event));
    this.layer.addEventListener("pointerleave", () => { if (this.from === undefined) this.on.cursor(null, this); });
    this.layer.addEventListener("pointerup", (event) => this.#release(event));
    this.layer.addEventListener("pointercancel", () => { this.from = undefined; this.cursor(null); });
    this.layer.addEventListener("dblclick", () => this.on.zoom(null));
    this.sizer = new ResizeObserver(() => { if (this.width !== this.element.clientWidth) this.draw(); });
    this.sizer.observe(this.element);
  }

  end() { this.sizer.disconnect(); }

  /** `series`: {x, y, color, dash, width, alpha, label, key}; `bands`: {x, low, high, color, key}; `marks`: {x, y, color, shape, title};
   * `range` of x; `tall`: the range of y; `focus`: the key of what is drawn above the others; `logx`, `logy`; `unit` of y; `along`: step, time or epoch. */
  set(what) {
    this.what = what;
    this.draw();
  }

  /** Draw what has a key above the others. */
  highlight(key) {
    if (!this.what || !this.width || this.what.focus === key) return;
    this.what.focus = key;
    this.#paint(this.canvas.getContext("2d"));
  }

  resize(height) {
    this.height = height;
    this.element.style.height = `${height}px`;
    this.draw();
  }

  #extent() {
    const { series, bands, range, tall, logx, logy } = this.what;
    let [left, right] = [Infinity, -Infinity];
    for (const { x } of [...series, ...bands]) {
      const first = logx ? x.find((each) => each > 0) : x[0];
      if (x.length && first !== undefined) { left = Math.min(left, first); right = Math.max(right, x[x.length - 1]); }
    }
    if (range) [left, right] = [logx && range[0] <= 0 ? Math.min(left, range[1] / 10) : range[0], range[1]];
    if (!(left <= right)) [left, right] = logx ? [1, 10] : [0, 1];
    if (left === right) [left, right] = logx ? [left / 2, left * 2] : [left - 1, right + 1];
    let [low, high] = [Infinity, -Infinity];
    const see = (value) => { if (Number.isFinite(value) && !(logy && value <= 0)) { if (value < low) low = value; if (value > high) high = value; } };
    for (const { x, y, faint } of series) {
      if (faint) continue;
      const from = Math.max(indexAt(x, left), 0);
      for (let at = from; at < x.length && (x[at] <= right || at === from); at += 1) if (x[at] >= left) see(y[at]);
    }
    for (const band of bands) band.x.forEach((x, at) => { if (x >= left && x <= right) { see(band.low[at]); see(band.high[at]); } });
    if (tall && !(logy && tall[0] <= 0)) return { left, right, low: tall[0], high: tall[1] };
    if (low > high) [low, high] = logy ? [0.1, 1] : [0, 1];
    if (logy) { if (low === high) [low, high] = [low / 2, high * 2]; else { const pad = (high / low) ** 0.05; [low, high] = [low / pad, high * pad]; } }
    else if (this.what.unit === "percent" && low >= 0 && high <= 100) [low, high] = [0, Math.max(high * 1.1, 10)];
    else { const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1; [low, high] = [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad]; }
    return { left, right, low, high };
  }

  draw() {
    const width = this.element.clientWidth, { height } = this;
    this.width = width;
    if (!this.what || !width) return;
    const { left, right, low, high } = this.#extent(), { logx, logy } = this.what;
    this.x = scale(left, right, MARGIN.left, width - MARGIN.right, logx);
    this.y = scale(low, high, height - MARGIN.bottom, MARGIN.top, logy);
    for (const canvas of [this.canvas, this.layer]) {
      Object.assign(canvas, { width: Math.round(width * devicePixelRatio), height: Math.round(height * devicePixelRatio) });
      Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    }
    this.#paint(this.canvas.getContext("2d"));
    this.#point();
  }

  ticks() {
    const { unit, along, logx, logy } = this.what, { x, y } = this;
    const wide = Math.max(Math.floor((this.width - MARGIN.left) / 64), 2), tall = Math.max(Math.floor(this.height / 30), 2);
    const across = (logx ? logTicks(x.low, x.high, wide) : linearTicks(x.low, x.high, wide, along === "time" ? SECONDS_STEPS : null).filter((each) => along !== "step" || Number.isInteger(each)));
    const up = logy ? logTicks(y.low, y.high, tall) : linearTicks(y.low, y.high, tall, unit === "seconds" ? SECONDS_STEPS : null);
    return { x: across.map((at) => [at, along === "time" ? clock(at) : tick(at, "value")]), y: up.map((at) => [at, tick(at, unit)]) };
  }

  #paint(pen) {
    const { width, height, x, y } = this, { series, bands, marks, title } = this.what;
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT_OF_TICKS;
    const { x: across, y: up } = this.ticks();
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const [value, label] of up) {
      const at = Math.round(y.to(value)) + 0.5;
      pen.strokeStyle = ink("--grid");
      pen.beginPath(); pen.moveTo(MARGIN.left, at); pen.lineTo(width - MARGIN.right, at); pen.stroke();
      pen.fillStyle = ink("--muted");
      pen.fillText(label, MARGIN.left - 6, at);
    }
    pen.textBaseline = "top";
    pen.textAlign = "center";
    pen.fillStyle = ink("--muted");
    for (const [value, label] of across) {
      const half = pen.measureText(label).width / 2;
      pen.fillText(label, Math.min(Math.max(x.to(value), half + 2), width - half - 2), height - MARGIN.bottom + 6);
    }
    pen.fillText(title, (MARGIN.left + width - MARGIN.right) / 2, height - 14);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left - 2, MARGIN.top - 2, width - MARGIN.left - MARGIN.right + 4, height - MARGIN.top - MARGIN.bottom + 4);
    pen.clip();
    const { focus = null } = this.what, found = focus !== null && series.some((each) => each.key === focus), back = (each) => found && each.key !== focus;
    for (const band of bands) if (!back(band)) this.#band(pen, band);
    for (const each of series) if (!found || back(each)) this.#line(pen, found ? { ...each, alpha: 0.15 } : each);
    for (const each of series) if (found && !back(each)) this.#line(pen, { ...each, width: (each.width ?? 1.5) + (each.faint ? 0 : 1) });
    pen.restore();
    for (const mark of marks) if (!found || (mark.key ?? mark.run) === focus) this.#mark(pen, mark); // one at the edge is whole
  }

  /** The pixels of a curve; null is a gap. */
  path({ x: xs, y: ys }) {
    const { x, y } = this, made = [];
    const from = Math.max(indexAt(xs, x.low) - 1, 0);
    for (let at = from; at < xs.length; at += 1) {
      const value = ys[at];
      const fits = Number.isFinite(value) && !(y.log && value <= 0) && !(x.log && xs[at] <= 0);
      made.push(fits ? [x.to(xs[at]), y.to(value)] : null);
      if (xs[at] > x.high) break;
    }
    return made;
  }

  #line(pen, each) {
    const points = this.path(each), color = ink(each.color);
    pen.strokeStyle = pen.fillStyle = color;
    pen.globalAlpha = each.alpha ?? 1;
    pen.lineWidth = each.width ?? 1.5;
    pen.lineJoin = "round";
    pen.setLineDash(DASHES[each.dash ?? 0]);
    pen.beginPath();
    let open = false;
    points.forEach((point) => {
      if (!point) { open = false; return; }
      if (open) pen.lineTo(...point); else pen.moveTo(...point);
      open = true;
    });
    pen.stroke();
    pen.setLineDash([]);
    const real = points.filter(Boolean);
    if (!each.faint && real.length < this.width / 14 && this.what.series.length < 30) {
      for (const [left, top] of real) { pen.beginPath(); pen.arc(left, top, 2.5, 0, 7); pen.fill(); }
    }
    if (!each.faint) this.#odd(pen, each);
    pen.globalAlpha = 1;
  }

  /** Marks at the upper edge where a curve is infinite or undefined. */
  #odd(pen, { x: xs, y: ys }) {
    let room = 500;
    for (let at = 0; at < xs.length && room; at += 1) {
      if (Number.isFinite(ys[at]) || xs[at] < this.x.low || xs[at] > this.x.high) continue;
      room -= 1;
      const left = this.x.to(xs[at]);
      pen.beginPath(); pen.moveTo(left - 4, MARGIN.top); pen.lineTo(left + 4, MARGIN.top); pen.lineTo(left, MARGIN.top + 6); pen.fill();
    }
  }

  #band(pen, { x: xs, low, high, color }) {
    pen.fillStyle = ink(color);
    pen.globalAlpha = 0.16;
    pen.beginPath();
    const there = xs.map((_, at) => at).filter((at) => Number.isFinite(low[at]) && Number.isFinite(high[at]) && !(this.y.log && low[at] <= 0));
    there.forEach((at, place) => { const point = [this.x.to(xs[at]), this.y.to(high[at])]; if (place) pen.lineTo(...point); else pen.moveTo(...point); });
    for (const at of there.reverse()) pen.lineTo(this.x.to(xs[at]), this.y.to(low[at]));
    pen.fill();
    pen.globalAlpha = 1;
  }

  #mark(pen, { x, y, color, shape }) {
    if (x < this.x.low || x > this.x.high || (this.x.log && x <= 0)) return;
    const left = this.x.to(x);
    pen.fillStyle = pen.strokeStyle = ink(color);
    if (shape === "checkpoint") {
      pen.lineWidth = 1;
      const bottom = this.height - MARGIN.bottom;
      pen.beginPath(); pen.moveTo(left, bottom - 7); pen.lineTo(left - 3.5, bottom); pen.lineTo(left + 3.5, bottom); pen.fill();
      return;
    }
    if (!Number.isFinite(y) || (this.y.log && y <= 0)) return;
    const top = this.y.to(y);
    if (top < MARGIN.top - 2 || top > this.height - MARGIN.bottom + 2) return;
    pen.beginPath();
    for (let corner = 0; corner < 10; corner += 1) {
      const size = corner % 2 ? 3 : 7, angle = (corner * Math.PI) / 5 - Math.PI / 2;
      pen.lineTo(left + size * Math.cos(angle), top + size * Math.sin(angle));
    }
    pen.closePath();
    pen.fill();
    pen.lineWidth = 1.5;
    pen.strokeStyle = ink("--panel");
    pen.stroke();
  }

  // --- cursor

  /** Show the cursor at an x; the box with values only if it is this plot's own. */
  cursor(x, own = false, top = null) {
    this.at = x;
    this.own = own;
    this.pointer = top;
    this.#point();
    if (x === null && this.nearest !== undefined) { this.nearest = undefined; this.on.near(null); }
  }

  #point() {
    const pen = this.layer.getContext("2d");
    pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    pen.clearRect(0, 0, this.width ?? 0, this.height);
    this.box.hidden = true;
    if (this.from !== undefined && this.to !== undefined) {
      pen.fillStyle = ink("--accent");
      pen.globalAlpha = 0.16;
      pen.fillRect(Math.min(this.from, this.to), MARGIN.top, Math.abs(this.to - this.from), this.height - MARGIN.top - MARGIN.bottom);
      pen.globalAlpha = 1;
    }
    if (this.at === null || !this.what || !this.x || this.at < this.x.low || this.at > this.x.high) return;
    const left = this.x.to(this.at);
    pen.strokeStyle = ink("--muted");
    pen.lineWidth = 1;
    pen.beginPath(); pen.moveTo(Math.round(left) + 0.5, MARGIN.top); pen.lineTo(Math.round(left) + 0.5, this.height - MARGIN.bottom); pen.stroke();
    const found = this.values(this.at);
    for (const { each, x, y } of found.slice(0, 60)) {
      if (!Number.isFinite(y) || (this.y.log && y <= 0)) continue;
      pen.fillStyle = ink(each.color);
      pen.beginPath(); pen.arc(this.x.to(x), this.y.to(y), 3.5, 0, 7); pen.fill();
    }
    if (this.own && found.length) this.#show(found, left);
  }

  /** The value of each curve near an x. */
  values(at) {
    const made = [], apart = (this.x.high - this.x.low) / 40;
    for (const each of this.what.series) {
      if (each.faint || !each.x.length) continue;
      const index = nearest(each.x, at);
      const gap = Math.max((each.x[each.x.length - 1] - each.x[0]) / Math.max(each.x.length - 1, 1), apart);
      if (Math.abs(each.x[index] - at) <= gap) made.push({ each, x: each.x[index], y: each.y[index], raw: each.raw?.(each.x[index]) });
    }
    return made;
  }

  #show(found, left) {
    const { unit, along } = this.what, show = UNITS[unit];
    const place = found.reduce((best, each) => (Math.abs(each.x - this.at) < Math.abs(best.x - this.at) ? each : best)).x;
    const near = this.pointer === null ? null : found.reduce((best, each) => (Math.abs(this.y.to(each.y) - this.pointer) < Math.abs(this.y.to(best.y) - this.pointer) ? each : best));
    const key = near && Math.abs(this.y.to(near.y) - this.pointer) < NEAR && new Set(found.map((each) => each.each.key)).size > 1 ? near.each.key : undefined;
    if (key !== this.nearest) { this.nearest = key; this.on.near(key ?? null); }
    const ordered = [...found].sort((a, b) => b.y - a.y || 0);
    const at = Math.max(ordered.indexOf(near), 0), from = Math.max(Math.min(at - MOST_IN_BOX / 2, ordered.length - MOST_IN_BOX), 0);
    const marks = this.what.marks.filter((mark) => mark.title && Math.abs(this.x.to(mark.x) - left) < 5);
    this.box.replaceChildren(
      h("p", { class: "where" }, along === "time" ? duration(place) : along === "epoch" ? `epoch ${num(place)}` : `step ${count(place)}`),
      h("table", {}, ordered.slice(from, from + MOST_IN_BOX).map((each) => h("tr", { class: each === near && ordered.length > 1 ? "near" : null },
        h("td", {}, h("span", { class: "swatch", css: { "border-top": `2px ${each.each.dash ? "dashed" : "solid"} var(${each.each.color})` } }), each.each.label),
        h("td", { class: "number" }, show(each.y)), each.raw === undefined ? null : h("td", { class: "number muted" }, show(each.raw))))),
      ordered.length > MOST_IN_BOX ? h("p", { class: "muted" }, `${ordered.length - MOST_IN_BOX} more`) : "",
      ...marks.slice(0, 3).map((mark) => h("p", { class: "muted" }, mark.title)));
    this.box.hidden = false;
    const wide = this.box.offsetWidth, over = left + 14 + wide > this.width;
    this.box.style.left = `${Math.max(over ? left - 14 - wide : left + 14, 0)}px`;
  }

  #place(event) {
    const box = this.layer.getBoundingClientRect();
    return [Math.min(Math.max(event.clientX - box.left, MARGIN.left), this.width - MARGIN.right), event.clientY - box.top];
  }

  #press(event) {
    if (event.button || !this.x || event.pointerType === "touch") return;
    this.layer.setPointerCapture(event.pointerId);
    [this.from] = this.#place(event);
    this.to = undefined;
  }

  #move(event) {
    if (!this.x) return;
    const [left, top] = this.#place(event);
    if (this.from !== undefined && Math.abs(left - this.from) > 4) this.to = left;
    this.pointer = top;
    this.on.cursor(this.x.from(left), this, top);
  }

  #release() {
    const { from, to } = this;
    this.from = this.to = undefined;
    if (from !== undefined && to !== undefined) this.on.zoom([this.x.from(Math.min(from, to)), this.x.from(Math.max(from, to))]);
    else this.#point();
  }
}
