// Runs as dots: what they were made with, or reached, against a metric.

import { DASH, h, num, shown, svg } from "./dom.js";

const WIDE = 640, TALL = 300, LEFT = 64, BOTTOM = 40, TOP = 12, RIGHT = 16;
const LOGARITHMIC = 50; // the largest to the smallest, from which on a scale of positive numbers is one of logarithms

/** Where values lie on an axis: numbers by size, all else by name. */
function scale(values, begin, end) {
  const numbers = values.filter(Number.isFinite);
  if (numbers.length === values.length && values.length) {
    const low = Math.min(...values), high = Math.max(...values);
    const log = low > 0 && high / low >= LOGARITHMIC, bent = log ? Math.log : (value) => value;
    const place = (value) => (high > low ? begin + ((bent(value) - bent(low)) / (bent(high) - bent(low))) * (end - begin) : (begin + end) / 2);
    const inner = [0.25, 0.5, 0.75].map((part) => (log ? low * (high / low) ** part : low + (high - low) * part));
    return { place, ticks: high > low ? [low, ...inner, high].map((value) => [value, num(value)]) : [[low, num(low)]], log };
  }
  const names = [...new Set(values.map(shown))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const place = (value) => begin + ((names.indexOf(shown(value)) + 0.5) / names.length) * (end - begin);
  return { place, ticks: names.slice(0, 12).map((name) => [name, name]), log: false };
}

/** `settings` keep what is chosen, `address` gives a run's. */
export function scatter(settings, address) {
  const choose = (label) => {
    const select = h("select", { "aria-label": label });
    select.addEventListener("change", () => { settings[label] = select.value; draw(); });
    return select;
  };
  const across = choose("Across"), up = choose("Up"), holder = h("div", { class: "dots" });
  const element = h("details", { class: "scatter" }, h("summary", {}, "Scatter"), h("div", { class: "tools" }, h("label", {}, "across", across), h("label", {}, "up", up)), holder);
  element.open = Boolean(settings.open);
  element.addEventListener("toggle", () => { settings.open = element.open; draw(); });
  let runs = [], columns = [], offered = "";

  function draw() {
    if (!element.open) return;
    const x = columns.find((column) => column.key === across.value), y = columns.find((column) => column.key === up.value);
    if (!x || !y) { holder.replaceChildren(h("p", { class: "muted" }, "Runs with parameters and metrics are shown here.")); return; }
    const dots = runs.map((run) => ({ run, x: x.value(run), y: y.value(run) })).filter((dot) => dot.x !== undefined && dot.x !== null && !Number.isNaN(dot.x) && Number.isFinite(dot.y));
    if (!dots.length) { holder.replaceChildren(h("p", { class: "muted" }, "No run has both.")); return; }
    const [xs, ys] = [scale(dots.map((dot) => dot.x), LEFT, WIDE - RIGHT), scale(dots.map((dot) => dot.y), TALL - BOTTOM, TOP)];
    const name = (column, axis) => column.name + (axis.log ? ", log scale" : "");
    holder.replaceChildren(svg("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, role: "group", "aria-label": `${y.name} against ${x.name}, ${dots.length} runs` },
      ys.ticks.map(([value, label]) => [svg("line", { x1: LEFT, x2: WIDE - RIGHT, y1: ys.place(value), y2: ys.place(value) }), svg("text", { x: LEFT - 8, y: ys.place(value) + 4, "text-anchor": "end" }, label)]),
      xs.ticks.map(([value, label], at) => svg("text", { x: xs.place(value), y: TALL - BOTTOM + 18, "text-anchor": xs.ticks.length > 1 && at === xs.ticks.length - 1 && Number.isFinite(value) ? "end" : "middle" }, label)),
      svg("text", { x: (LEFT + WIDE) / 2, y: TALL - 6, "text-anchor": "middle" }, `${name(x, xs)} \u2192`),
      svg("text", { x: 12, y: TALL / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${TALL / 2})` }, `${name(y, ys)} \u2192`),
      dots.map((dot) => {
        const said = `${dot.run.id}: ${x.name} ${shown(dot.x) || DASH}, ${y.name} ${num(dot.y)}`;
        return svg("a", { href: address(dot.run.id), "aria-label": said }, svg("circle", { cx: xs.place(dot.x), cy: ys.place(dot.y), r: 5 }, svg("title", {}, said)));
      })));
  }

  /** Show other runs. `given`: what a run can have, as the table's columns. */
  function update(found, given) {
    [runs, columns] = [found, given];
    const now = columns.map((column) => column.key).join("\n");
    if (now !== offered) {
      offered = now;
      const parameters = columns.filter((column) => !column.metric), metrics = columns.filter((column) => column.metric);
      const fill = (select, some, wanted) => {
        select.replaceChildren(...some.map((column) => h("option", { value: column.key }, column.name)));
        const first = some.find((column) => column.key === wanted) ?? some.find((column) => column.differs && !column.name.startsWith("plugins.")) ?? some.find((column) => column.wanted) ?? some[0];
        if (first) select.value = first.key;
      };
      fill(across, [...parameters, ...metrics], settings.Across);
      fill(up, metrics, settings.Up);
    }
    draw();
  }

  return { element, update };
}
