// The page: the list of runs, the run that is open, and the keyboard.

import { DASH, ago, count, duration, figure, h, moment, num, number, seldom } from "./dom.js";
import { makeSource } from "./source.js";
import { Data } from "./data.js";
import { TABS, problem } from "./views.js";
import { RunsTable } from "./table.js";

const STATUS = { live: "live", finished: "finished", crashed: "crashed", silent: "silent" };
const MOST_OVERLAID = 7;
const THEMES = ["auto", "light", "dark"];
const KEYS = [
  ["/", "search the runs"], ["\u2191 \u2193", "walk through the runs"], ["Enter", "open the run"], ["x", "lay the run over the open one"],
  ["[ ]", "the tab before, the next tab"], ["s", "smoothing"], ["l", "log scale"], ["0", "show all of the charts again"],
  ["\u2190 \u2192", "on a chart: move the cursor"], ["+ \u2212", "on a chart: zoom"], ["t", "light, dark or as the system has it"],
  ["Esc", "leave the search, close this"], ["?", "this help"],
];

/** What survives a reload, where the browser keeps anything. */
const kept = {
  get(key, otherwise) { try { return localStorage.getItem(`loopkit-${key}`) ?? otherwise; } catch { return otherwise; } },
  set(key, value) { try { localStorage.setItem(`loopkit-${key}`, value); } catch { /* a report from disk */ } },
};

export const data = new Data(makeSource());
const settings = { smooth: 0, log: false, x: "step" };
let at = { id: null, tab: "metrics", over: [], table: false };
let view = null; // of the open tab: what it is of, and how to end it
let wanted = "";

// ---------------------------------------------------------------------------------------------------------------- theme

let theme = THEMES.includes(kept.get("theme", "auto")) ? kept.get("theme", "auto") : "auto";
const themeButton = h("button", { type: "button", class: "quiet", on: { click: () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3]) } });

function setTheme(name) {
  theme = name;
  kept.set("theme", name);
  document.documentElement.toggleAttribute("data-theme", name !== "auto");
  if (name !== "auto") document.documentElement.dataset.theme = name;
  themeButton.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[name];
  themeButton.setAttribute("aria-label", `Colors: ${name}. Change`);
  window.dispatchEvent(new Event("theme"));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("theme")));

// ---------------------------------------------------------------------------------------------------------------- frame

const state = h("span", { class: "state", role: "status" });
const banner = h("div", { class: "banner", role: "alert", hidden: true });
const search = h("input", { type: "search", id: "search", placeholder: "Search runs", "aria-label": "Search runs", autocomplete: "off", spellcheck: "false" });
const list = h("ul", { class: "list", role: "listbox", "aria-label": "Runs" });
const nothing = h("div", { class: "empty", hidden: true });
const total = h("span", { class: "muted" });
const help = h("dialog", { "aria-label": "Keyboard" }, h("h2", {}, "Keyboard"),
  h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, key.split(" ").map((each) => h("kbd", {}, each))), h("dd", {}, what)])),
  h("button", { type: "button", on: { click: () => help.close() } }, "Close"));
const columns = h("div", { class: "columns", "aria-hidden": "true" }, ["run", "metric", "step", "elapsed", "state"].map((name) => h("span", {}, name)));
const aside = h("aside", { "aria-label": "Runs" }, h("div", { class: "find" }, search, total, h("a", { href: "#/table" }, "Table")), columns, list, nothing);
const main = h("main", { tabindex: -1 });
const helpButton = h("button", { type: "button", class: "quiet", "aria-label": "Keyboard help", on: { click: () => help.showModal() } }, "?");
document.getElementById("app").append(
  h("header", { class: "top" }, h("a", { class: "brand", href: "#/" }, h("span", { class: "mark", "aria-hidden": "true" }), "loopkit", h("span", { class: "muted" }, data.source.live ? "monitor" : "report")),
    state, themeButton, helpButton),
  banner, h("div", { class: "body" }, aside, main), help);
help.addEventListener("click", (event) => { if (event.target === help) help.close(); });

// ---------------------------------------------------------------------------------------------------------------- runs

const rows = new Map(); // by run: its element and what it shows
let active = null; // the row that the tab key reaches

const MAIN = [/^val\/loss$/, /^val\//, /\/loss$/, /\/loss\//, /^(?!run\/|resources\/|lr|grad_norm)/];

function mainMetric(run) {
  const names = Object.keys(run.metrics ?? {});
  for (const form of MAIN) {
    const found = names.find((name) => form.test(name));
    if (found) return [found, run.metrics[found]];
  }
  return ["", null];
}

function makeRow(run) {
  const part = (name) => h("span", { class: name });
  const parts = { dot: h("span", { class: "status", "aria-hidden": "true" }), name: part("name"), path: part("path muted"), metric: part("metric"), key: part("key muted"),
    step: part("step"), took: part("took"), when: part("when muted"), status: part("word") };
  const over = h("button", { type: "button", class: "over", tabindex: -1, title: "Lay over the open run (x)", "aria-label": `Lay ${run.id} over the open run` }, "+");
  over.addEventListener("click", (event) => { event.stopPropagation(); overlay(run.id); });
  const element = h("li", { role: "option", tabindex: -1, "aria-selected": "false" }, parts.dot,
    h("span", { class: "names" }, parts.name, parts.path), h("span", { class: "metrics" }, parts.metric, parts.key),
    parts.step, parts.took, h("span", { class: "about" }, parts.status, parts.when), over);
  element.dataset.run = run.id;
  element.addEventListener("click", () => go({ id: run.id }));
  element.addEventListener("focus", () => activate(run.id));
  return { element, parts, over };
}

const title = (run) => (run.name === "." ? "run" : run.name); // the folder that is shown is the run

const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };

function fillRow(run) {
  const { element, parts, over } = rows.get(run.id);
  const [name, value] = mainMetric(run);
  parts.dot.dataset.status = run.status;
  put(parts.name, title(run));
  put(parts.path, run.id === run.name || run.id === "." ? "" : run.id);
  put(parts.metric, value === null ? "" : figure(name, value));
  put(parts.key, name);
  parts.step.dataset.status = STATUS[run.status] ?? run.status;
  put(parts.step, run.total_steps ? `${count(run.step)} / ${count(run.total_steps)}` : `step ${count(run.step)}`);
  put(parts.took, duration(run.updated - run.started));
  put(parts.when, ago(run.updated));
  put(parts.status, STATUS[run.status] ?? run.status);
  const laid = at.over.includes(run.id), place = [at.id, ...at.over].indexOf(run.id);
  element.setAttribute("aria-selected", String(run.id === at.id));
  element.classList.toggle("overlaid", laid);
  element.style.setProperty("--run", place >= 0 && at.over.length ? `var(--s${place})` : "transparent");
  over.hidden = !at.id || run.id === at.id;
  put(over, laid ? "\u2212" : "+");
}

const ORDER = { live: 0, silent: 1, crashed: 2, finished: 2 };

function drawList() {
  const text = wanted.trim().toLowerCase();
  const found = [...data.runs.values()].filter((run) => `${run.id} ${run.status}`.toLowerCase().includes(text))
    .sort((a, b) => ORDER[a.status] - ORDER[b.status] || b.started - a.started || a.id.localeCompare(b.id));
  for (const id of rows.keys()) if (!data.runs.has(id)) rows.delete(id);
  const elements = found.map((run) => {
    if (!rows.has(run.id)) rows.set(run.id, makeRow(run));
    fillRow(run);
    return rows.get(run.id).element;
  });
  if (elements.length !== list.children.length || elements.some((element, place) => element !== list.children[place])) {
    const focused = list.contains(document.activeElement) ? document.activeElement : null;
    list.replaceChildren(...elements);
    if (focused?.isConnected) focused.focus({ preventScroll: true });
  }
  const left = data.leftOut || !data.searched;
  const known = left ? `${count(data.runs.size)} of ${count(data.runs.size + data.leftOut)}${data.searched ? "" : "+"}` : `${data.runs.size}`;
  put(total, data.seq === undefined ? "" : text ? `${found.length} of ${data.runs.size}` : `${known} run${known === "1" ? "" : "s"}`);
  total.title = [data.leftOut ? "those that were written to last" : "", data.searched ? "" : "the folder has too many files to search them all"].filter(Boolean).join("; ");
  if (!found.some((run) => run.id === active)) activate(found.find((run) => run.id === at.id)?.id ?? found[0]?.id ?? null);
  nothing.hidden = found.length > 0;
  list.hidden = columns.hidden = !found.length;
  if (!found.length) {
    nothing.replaceChildren(...(data.failure ? [h("h3", {}, "No answer"), h("p", {}, `${data.failure.message}; it is asked again every two seconds.`)]
      : data.state === "loading" && !data.seq && data.source.live ? [h("p", { class: "loading" }, "Loading the runs")]
        : text ? [h("h3", {}, "No such run"), h("p", {}, "No name, folder or state has that in it.")]
          : [h("h3", {}, "No runs yet"), h("p", {}, "A run shows up here with the first line of its log. Add this to the plugins of a learner:"), h("pre", {}, 'Monitor("runs/first")')]));
  }
}

function activate(id) {
  if (rows.has(active)) rows.get(active).element.tabIndex = -1;
  active = id;
  if (rows.has(id)) rows.get(id).element.tabIndex = 0;
}

function walk(by) {
  const all = [...list.children];
  const here = all.findIndex((element) => element.dataset.run === active);
  const to = all[Math.max(0, Math.min(all.length - 1, by === -Infinity ? 0 : by === Infinity ? all.length - 1 : here + by))];
  to?.focus();
  to?.scrollIntoView({ block: "nearest" });
}

list.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -Infinity, End: Infinity }[event.key];
  if (by) walk(by);
  else if (event.key === "Enter" && event.target.dataset.run) go({ id: event.target.dataset.run });
  else if ((event.key === "x" || event.key === " ") && event.target.dataset.run) overlay(event.target.dataset.run);
  else return;
  event.preventDefault();
});
search.addEventListener("input", () => { wanted = search.value; drawList(); });
search.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") { event.preventDefault(); walk(0); }
  else if (event.key === "Enter" && list.firstElementChild) go({ id: list.firstElementChild.dataset.run });
  else if (event.key === "Escape") { search.value = wanted = ""; drawList(); search.blur(); }
});

/** Lay a run over the open one, or take it away; with none open, open it. */
function overlay(id) {
  if (!at.id || id === at.id) { if (!at.id) go({ id }); return; }
  const over = at.over.includes(id) ? at.over.filter((each) => each !== id) : [...at.over, id].slice(-MOST_OVERLAID);
  go({ over, tab: TABS.find((tab) => tab.id === at.tab).several ? at.tab : "metrics" });
}

// ------------------------------------------------------------------------------------------------------------- location

function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, id, tab] = path.split("/");
  const plain = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
  return { table: kind === "table", id: kind === "run" && id ? plain(id) : null, tab: TABS.some((each) => each.id === tab) ? tab : "metrics",
    over: kind === "run" ? new URLSearchParams(query).getAll("with").slice(0, MOST_OVERLAID) : [] };
}

function address({ id, tab, over }) {
  const query = new URLSearchParams(over.map((each) => ["with", each])).toString();
  return `#/run/${encodeURIComponent(id)}/${tab}${query ? `?${query}` : ""}`;
}

function go(changes) {
  const to = { ...at, ...changes };
  to.over = to.over.filter((id) => id !== to.id);
  location.hash = address(to);
}

window.addEventListener("hashchange", () => { at = read(); drawList(); open(); });

// -------------------------------------------------------------------------------------------------------------- the run

let head = null;

async function open() {
  document.body.className = at.id ? "run" : at.table ? "table-page" : "home";
  document.title = at.id ? `${at.id} \u00b7 loopkit` : "loopkit monitor";
  if (at.table) { drawTable(); return; }
  if (!at.id) { endView(); head = null; main.replaceChildren(); return; }
  const mine = [at.id, ...at.over];
  const missing = mine.filter((id) => !data.details.has(id));
  if (missing.length) {
    if (!data.details.has(at.id)) { endView(); head = null; main.replaceChildren(h("p", { class: "loading" }, "Reading the log")); }
    const asked = at;
    const answers = await Promise.allSettled(missing.map((id) => data.open(id)));
    if (asked !== at) return;
    const failed = answers.find((answer, place) => answer.status === "rejected" && missing[place] === at.id);
    if (failed) {
      endView();
      main.replaceChildren(h("div", { class: "empty" }, h("h3", {}, failed.reason.status === 404 ? "There is no such run" : "The run could not be read"), h("p", {}, `${failed.reason.message}.`),
        h("button", { type: "button", on: { click: open } }, "Try again"), h("a", { href: "#/" }, "All runs")));
      return;
    }
  }
  drawRun();
}

function drawTable() {
  if (view?.table) { view.table.refresh(); return; }
  endView();
  head = null;
  const table = new RunsTable(data, settings, ([id, ...over]) => go({ id, over, tab: "metrics" }));
  view = { table, end: () => table.end() };
  main.replaceChildren(table.element);
}

function endView() {
  view?.end?.();
  view = null;
}

function context() {
  const ids = [at.id, ...at.over].filter((id) => data.details.has(id));
  return { data, settings, details: ids.map((id) => data.details.get(id)), colors: new Map([at.id, ...at.over].map((id, place) => [id, place])) };
}

function makeHead() {
  const part = (label, title) => {
    const value = h("dd", {});
    return { value, element: h("div", { title }, h("dt", {}, label), value) };
  };
  const made = { id: at.id, name: h("h1", {}), status: h("span", { class: "chip" }), path: h("span", { class: "muted path" }),
    step: part("step"), epoch: part("epoch", "complete epochs"), took: part("elapsed", "from the first line of the log to the last"), left: part("time left"), speed: part("steps/s", "as measured last"), samples: part("samples/s", "as measured last"), when: part("updated"),
    pick: h("span", { class: "pick" }), fill: h("span", {}), trouble: h("div", { class: "trouble" }), laid: h("div", { class: "laid" }), content: h("div", { class: "content", id: "content", role: "tabpanel", tabindex: -1 }) };
  made.progress = h("div", { class: "progress", role: "progressbar", "aria-label": "steps", "aria-valuemin": 0, "aria-valuemax": 100 }, made.fill);
  made.tabs = TABS.map((tab) => {
    const note = h("span", { class: "count" });
    const button = h("button", { type: "button", role: "tab", id: `tab-${tab.id}`, "aria-controls": "content", on: { click: () => go({ tab: tab.id }) } }, tab.label, note);
    return { tab, note, button };
  });
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the run" }, made.tabs.map(({ button }) => button));
  tabs.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) { event.preventDefault(); nextTab(by); made.tabs.find(({ tab }) => tab.id === read().tab).button.focus(); }
  });
  main.replaceChildren(h("div", { class: "head" },
    h("div", { class: "title" }, h("a", { class: "back", href: "#/", "aria-label": "All runs" }, "\u2039 Runs"), made.name, made.status, made.path, made.pick),
    h("dl", { class: "facts" }, [made.step, made.epoch, made.took, made.left, made.speed, made.samples, made.when].map(({ element }) => element)),
    made.progress, made.laid), made.trouble, tabs, made.content);
  return made;
}

function nextTab(by) {
  const here = TABS.findIndex((tab) => tab.id === at.tab);
  go({ tab: TABS[(here + by + TABS.length) % TABS.length].id });
}

function drawRun() {
  if (head?.id !== at.id) { endView(); head = makeHead(); }
  const here = context(), [detail] = here.details;
  drawHead();
  head.laid.replaceChildren(...(at.over.length ? [at.id, ...at.over].map((id, place) => h("span", { class: "laid-run" }, h("span", { class: "dot", css: { background: `var(--s${place})` } }),
    data.runs.get(id)?.name ?? id, place ? h("button", { type: "button", class: "quiet", "aria-label": `Take ${id} away`, on: { click: () => overlay(id) } }, "\u00d7") : null)) : []));
  head.pick.replaceChildren(picker());
  const trouble = at.tab === "messages" ? null : problem(detail);
  head.trouble.replaceChildren(...(trouble ? [trouble] : []));
  for (const { tab, note, button } of head.tabs) {
    const chosen = tab.id === at.tab, many = tab.count?.(detail);
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
    note.textContent = many ? String(many) : "";
    note.classList.toggle("bad", Boolean(tab.bad?.(detail)));
    if (chosen && view?.tab !== at.tab) button.scrollIntoView({ block: "nearest", inline: "center" });
  }
  const tab = TABS.find((each) => each.id === at.tab);
  const key = JSON.stringify([at.tab, tab.several ? [at.id, ...at.over] : at.id, tab.key(here)]);
  if (view?.key === key) { view.update?.(here); return; }
  const same = view?.tab === at.tab && view.id === at.id;
  const scrolled = main.scrollTop;
  endView();
  view = { key, tab: at.tab, id: at.id, ...tab.make(here) };
  head.content.setAttribute("aria-labelledby", `tab-${at.tab}`);
  head.content.replaceChildren(view.element);
  if (same) main.scrollTop = scrolled;
}

/** Choose a run to lay over this one, without the list beside it. */
function picker() {
  const others = [...data.runs.values()].filter((run) => run.id !== at.id && !at.over.includes(run.id)).slice(0, 500);
  if (!others.length || at.over.length >= MOST_OVERLAID) return "";
  const select = h("select", { "aria-label": "Compare with another run" }, h("option", { value: "" }, "Compare with\u2026"), others.map((run) => h("option", { value: run.id }, run.id)));
  select.addEventListener("change", () => { if (select.value) overlay(select.value); });
  return select;
}

function drawHead() {
  const run = data.runs.get(at.id) ?? data.details.get(at.id);
  if (!head || !run || head.id !== at.id) return;
  const metrics = { ...data.details.get(at.id)?.metrics, ...run.metrics }, live = run.status === "live";
  const took = run.updated - run.started, steps = run.total_steps;
  put(head.name, title(run));
  put(head.path, run.id === run.name || run.id === "." ? "" : run.id);
  put(head.status, STATUS[run.status] ?? run.status);
  head.status.dataset.status = run.status;
  put(head.step.value, steps ? `${count(run.step)} / ${count(steps)}` : count(run.step));
  put(head.epoch.value, count(run.epoch));
  put(head.took.value, duration(took) + (run.fits > 1 ? ", with pauses" : ""));
  const mean = took > 0 && run.step && run.fits < 2 ? run.step / took : null; // pauses are no part of it
  const guess = steps && mean ? (steps - run.step) / mean : NaN;
  head.left.element.hidden = !live;
  put(head.left.value, live ? duration(number(metrics["run/time_left"] ?? guess)) : DASH);
  const pace = metrics["run/throughput/steps_per_second"] ?? mean;
  put(head.speed.value, pace === null ? DASH : num(pace));
  const samples = metrics["run/throughput/samples_per_second"];
  head.samples.element.hidden = samples === undefined;
  put(head.samples.value, samples === undefined ? DASH : num(samples));
  put(head.when.value, ago(run.updated));
  head.when.element.title = moment(run.updated);
  head.progress.hidden = !steps;
  if (steps) {
    const done = Math.min(run.step / steps, 1) * 100;
    head.fill.style.width = `${done}%`;
    head.progress.setAttribute("aria-valuenow", done.toFixed(0));
    head.progress.dataset.status = run.status;
  }
}

// ---------------------------------------------------------------------------------------------------------- what happens

const listSoon = seldom(drawList, 100);
const headSoon = seldom(drawHead, 100);
const runSoon = seldom(() => { if (at.id && head?.id === at.id && data.details.has(at.id)) drawRun(); }, 50);
const tableSoon = seldom(() => { if (at.table) drawTable(); }, 250);
const changed = new Set();
const rowsSoon = seldom(() => {
  for (const id of changed) if (rows.has(id) && data.runs.has(id)) fillRow(data.runs.get(id));
  changed.clear();
}, 200);

data.addEventListener("list", () => {
  drawState();
  listSoon();
  headSoon();
  tableSoon();
});
data.addEventListener("run", ({ detail: { id } }) => {
  changed.add(id);
  rowsSoon();
  if (id === at.id) headSoon();
});
data.addEventListener("detail", ({ detail: { id } }) => { if (id === at.id || at.over.includes(id)) runSoon(); else tableSoon(); });
data.addEventListener("state", drawState);

function drawState() {
  if (!data.source.live) { state.textContent = ""; return; }
  state.dataset.state = data.state;
  state.textContent = { loading: data.seq === undefined ? "loading" : "connecting", open: "connected", lost: "not connected", refused: "refused" }[data.state];
  banner.hidden = data.state === "open" || data.state === "loading";
  banner.textContent = data.state === "refused" ? "The server wants its token: open the address that loopkit monitor has printed."
    : "The server is gone. What is shown is what it said last; the page goes on by itself when it is back.";
}

setInterval(() => {
  for (const run of data.runs.values()) if (rows.has(run.id)) put(rows.get(run.id).parts.when, ago(run.updated));
  drawHead();
}, 5000);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = event.target.closest?.("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (typing) return;
  const press = {
    "/": () => { if (document.body.className === "run" && matchMedia("(max-width: 800px)").matches) location.hash = "#/"; search.focus(); search.select(); },
    "?": () => help.showModal(),
    "[": () => { if (at.id) nextTab(-1); },
    "]": () => { if (at.id) nextTab(1); },
    t: () => themeButton.click(),
    s: () => document.getElementById("smooth")?.focus(),
    l: () => document.getElementById("log")?.click(),
    0: () => document.getElementById("all")?.click(),
    ArrowDown: () => { if (document.activeElement === document.body) walk(0); else return false; return true; },
  }[event.key];
  if (press && press() !== false) event.preventDefault();
});

setTheme(theme);
at = read();
document.body.className = at.id ? "run" : at.table ? "table-page" : "home";
drawState();
drawList();
await data.begin();
if (!data.source.live && !at.id && !at.table && data.runs.size === 1) {
  at = { ...at, id: [...data.runs.keys()][0] };
  history.replaceState(null, "", address(at));
}
drawList();
drawState();
await open();
