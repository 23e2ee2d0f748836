// Elements, and numbers as people read them. All text becomes text nodes: nothing here makes markup of data.

/** An element. `props`: `class`, `css` (styles), `on` (listeners), anything else is an attribute. */
export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key === "css") for (const [name, style] of Object.entries(value)) element.style.setProperty(name, style);
    else if (key === "on") for (const [name, listener] of Object.entries(value)) element.addEventListener(name, listener);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A button; `click` is called with its event. */
export const button = (props, click, ...children) => h("button", { type: "button", ...props, on: { click } }, children);

/** A dot of a color of the style sheet. */
export const dot = (color) => h("span", { class: "dot", css: { background: `var(${color})` } });
export const muted = (...children) => h("span", { class: "muted" }, children);
export const toolbar = (...children) => h("div", { class: "tools" }, children);
export const remark = (...children) => h("p", { class: "muted" }, children);

/** What is shown where there is nothing. */
export const empty = (title, text) => h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, text));
export const isThere = (value) => value !== undefined && value !== null && !Number.isNaN(value);

/** The address of a run's page. */
export const addressOf = (id, tab = "metrics") => `#/run/${encodeURIComponent(id)}/${tab}`;

export const DASH = "\u2013";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A number of the log: infinite and undefined ones come as the strings "inf", "-inf", "nan". */
export function number(value) {
  if (typeof value === "string") return { inf: Infinity, "-inf": -Infinity, nan: NaN }[value] ?? NaN;
  return value ?? NaN;
}

/** Four significant digits, as a person writes them: 0.2, 1,234, 3.1e-5. */
export function num(value) {
  if (value === null || value === undefined) return DASH;
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  const size = Math.abs(value);
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return String(Number(value.toExponential(2)).toExponential()).replace("e+", "e");
  if (Number.isInteger(value) || size >= 1e3) return grouped.format(value);
  return String(Number(value.toPrecision(4)));
}

export const count = (value) => (Number.isFinite(value) ? grouped.format(value) : DASH);

function scaled(value, base, units) {
  if (!Number.isFinite(value)) return num(value);
  let at = 0;
  while (Math.abs(value) >= base && at < units.length - 1) { value /= base; at += 1; }
  const digits = at === 0 || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)}${units[at]}`;
}

export const short = (value) => scaled(value, 1000, ["", " k", " M", " G", " T"]);
export const bytes = (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
const BYTES = /(^|\/)peak_memory$/;
/** The unit of a metric, and its value as text. */
export const unitOf = (name) => (BYTES.test(name) ? "bytes" : "value");
export const figure = (name, value) => (BYTES.test(name) ? bytes : num)(value);
export const percent = (value) => (Number.isFinite(value) ? `${value.toFixed(value < 10 ? 1 : 0)} %` : num(value));

/** A duration of seconds. */
export function duration(value) {
  if (!Number.isFinite(value)) return DASH;
  if (value < 0) return DASH;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toFixed(value < 1e-4 ? 1 : 0)} \u00b5s`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** How long ago, in one unit. */
export function ago(time, now = Date.now() / 1000) {
  const passed = now - time;
  if (!(time > 0)) return DASH;
  if (passed < 2) return "now";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (passed >= size) return `${Math.floor(passed / size)} ${unit} ago`;
  }
  return `${Math.floor(passed)} s ago`;
}

/** A moment, in the reader's time zone. */
export function moment(time) {
  if (!(time > 0)) return DASH;
  const date = new Date(time * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ` +
    `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** A value of a table or a hyperparameter, as text. */
export function shown(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "number") return Number.isInteger(value) ? String(value) : num(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** The rows of a logged table as objects; none if there is no table. */
export function rowsOf(table) {
  if (!Array.isArray(table?.columns) || !Array.isArray(table.rows)) return [];
  return table.rows.map((row) => Object.fromEntries(table.columns.map((column, at) => [column, row[at]])));
}

/** Call at most once in so many milliseconds, the last time at the end of them. */
export function seldom(call, wait) {
  let timer = 0;
  return () => { timer ||= setTimeout(() => { timer = 0; call(); }, wait); };
}

/** An element of a drawing; `attributes` are set as they are. */
export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(key, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

/** A text in a drawing. */
export const label = (x, y, anchor, ...text) => svg("text", { x, y, "text-anchor": anchor }, text);

/** Give the reader a file. */
export function save(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  h("a", { href: url, download: name.replace(/[^\w.-]+/g, "_") }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Things that are open over the page, the latest last; Esc closes the last one, a click elsewhere all. */
const opened = [];

export function closePopovers(inside = null) {
  for (const each of [...opened].reverse()) if (!inside || !each.element.contains(inside)) each.close();
}
if (globalThis.document) {
  document.addEventListener("pointerdown", (event) => closePopovers(event.target));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !opened.length) return;
    const last = opened[opened.length - 1];
    last.close();
    last.button.focus();
    event.stopImmediatePropagation();
    event.preventDefault();
  }, true);
}

/** Where the part of the page that scrolls an element ends. */
function rightOf(element) {
  for (let each = element.parentElement; each; each = each.parentElement) {
    if (getComputedStyle(each).overflowY !== "visible") return Math.min(each.getBoundingClientRect().left + each.clientWidth, innerWidth);
  }
  return innerWidth;
}

/** A button that opens a box below it. `fill()` returns what is in the box, each time that it is opened. */
export function popover(label, fill, props = {}) {
  const button = h("button", { type: "button", "aria-haspopup": "true", "aria-expanded": "false", ...props }, label);
  const box = h("div", { class: "popover", hidden: true });
  const element = h("span", { class: "pops" }, button, box);
  const entry = { element, button, close: () => {
    box.hidden = true;
    button.setAttribute("aria-expanded", "false");
    opened.splice(opened.indexOf(entry), 1);
  } };
  button.addEventListener("click", () => {
    if (!box.hidden) { entry.close(); return; }
    closePopovers(element);
    box.replaceChildren(...[fill(entry.close)].flat());
    box.hidden = false;
    button.setAttribute("aria-expanded", "true");
    opened.push(entry);
    const over = box.getBoundingClientRect();
    box.style.marginLeft = "0px";
    const edge = rightOf(element) - 8;
    if (over.right > edge) box.style.marginLeft = `${edge - over.right}px`;
    box.querySelector("input, button, select")?.focus({ preventScroll: true });
  });
  return { element, button, close: () => { if (!box.hidden) entry.close(); } };
}

/** A field that is searched with. */
export function searchField(name, value, change) {
  const field = h("input", { type: "search", placeholder: name, "aria-label": name, value });
  field.addEventListener("input", () => change(field.value));
  return field;
}

/** A control with its name before it. */
export const labelled = (name, control) => h("label", {}, name, control);

/** A flag with its name after it. */
export function flag(name, checked, change, props = {}) {
  const box = h("input", { type: "checkbox", ...props });
  box.checked = checked;
  box.addEventListener("change", () => change(box.checked));
  return h("label", {}, box, name);
}

/** A choice; `options` are `[value, text]`. */
export function choice(name, options, value, change, props = {}) {
  const select = h("select", { "aria-label": name, ...props }, options.map(([each, text]) => h("option", { value: each }, text)));
  select.value = value;
  select.addEventListener("change", () => change(select.value));
  return select;
}
