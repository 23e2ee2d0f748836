// A chart as a file: SVG, the same as PNG, and CSV of the points that it shows.

import { save, svg } from "./dom.js";

const FONT = { "font-family": "system-ui, sans-serif", "font-size": 11 };
const LEGEND_LINE = 18;
const DENSITY = 2; // pixels of the PNG to one of the page

/** The rows of a table for a spreadsheet: it runs what begins with =, +, - or @, unless that is a number. */
export function csv(rows) {
  const cell = (value) => {
    const text = String(value ?? "");
    const safe = /^[=+\-@\t\r]/.test(text) && !Number.isFinite(Number(text)) ? `'${text}` : text;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

/** What a plot shows, as a drawing of its own. `lines`: `{label, color, dash, width, points}`, with x and y in pixels. */
export function drawing({ title, width, height, box, lines, ticks, ink }) {
  const named = lines.filter((line) => line.label), top = 24;
  const whole = top + height + named.length * LEGEND_LINE + 8;
  const text = (x, y, anchor, said, fill, more = {}) => svg("text", { x, y, "text-anchor": anchor, fill, ...FONT, ...more }, said);
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  return svg("svg", { width, height: whole, viewBox: `0 0 ${width} ${whole}` },
    svg("rect", { width, height: whole, fill: ink("--panel") }),
    text(10, 16, "start", title, ink("--text"), { "font-size": 13, "font-weight": 600 }),
    svg("clipPath", { id: clip }, svg("rect", { x: box.left, y: box.top - 3, width: box.width, height: box.height + 6 })),
    svg("g", { transform: `translate(0 ${top})` },
      ticks.y.map(({ at, label }) => [svg("line", { x1: box.left, x2: box.left + box.width, y1: at, y2: at, stroke: ink("--grid") }), text(box.left - 6, at + 4, "end", label, ink("--muted"))]),
      ticks.x.map(({ at, label }) => text(at, box.top + box.height + 15, "middle", label, ink("--muted"))),
      text(box.left + box.width / 2, box.top + box.height + 30, "middle", ticks.name, ink("--muted")),
      svg("g", { "clip-path": `url(#${clip})` }, lines.map(({ color, opacity = 1, dash, width: size, points }) => svg("path", { d: pathOf(points), fill: "none", stroke: color, "stroke-opacity": opacity, "stroke-width": size, "stroke-dasharray": dash.join(" ") || null, "stroke-linejoin": "round", "stroke-linecap": "round" })))),
    named.map(({ label, color, dash }, at) => {
      const y = top + height + at * LEGEND_LINE + 8;
      return [svg("line", { x1: 12, x2: 34, y1: y, y2: y, stroke: color, "stroke-width": 2, "stroke-dasharray": dash.join(" ") || null }), text(42, y + 4, "start", label, ink("--text"))];
    }));
}

/** A path through points; null is a gap. A point alone is a dot. */
function pathOf(points) {
  let pen = "M";
  return points.map((point, at) => {
    if (point === null) { pen = "M"; return ""; }
    const [x, y] = point.map((each) => each.toFixed(1));
    const made = pen === "M" && !points[at + 1] ? `M${x} ${y}h0` : `${pen}${x} ${y}`;
    pen = "L";
    return made;
  }).join("");
}

/** Save a drawing as SVG or PNG. */
export async function saveDrawing(element, name, form) {
  const text = new XMLSerializer().serializeToString(element);
  if (form === "svg") { save(`${name}.svg`, "image/svg+xml", text); return; }
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: DENSITY * element.getAttribute("width"), height: DENSITY * element.getAttribute("height") });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  save(`${name}.png`, "image/png", await new Promise((done) => { canvas.toBlob(done); }));
}
