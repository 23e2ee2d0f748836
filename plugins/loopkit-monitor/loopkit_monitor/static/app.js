// The page: its frame, the workspace, the run that is open, and the keyboard.

import { DASH, ago, button, closePopovers, count, dot, duration, h, moment, muted, num, number, popover, seldom, toolbar } from "./dom.js";
import { makeSource } from "./source.js";
import { Data } from "./data.js";
import { emptyState, readState, writeState } from "./state.js";
import { markdown } from "./markdown.js";
import { TABS, problem } from "./views.js";
import { Workspace } from "./workspace.js";

const MOST_OVERLAID = 7;
const THEMES = ["auto", "light", "dark"];
const KEYS = [
  ["/", "filter the runs"], ["\u2191 \u2193", "walk through the runs"], ["Enter", "open the run"], ["x", "show or hide the run in the charts"], ["o", "only this run, or those from before"],
  ["[ ]", "the tab before, the next tab"], ["s", "smoothing"], ["l", "log scale"], ["0", "show all of the charts again"],
  ["\u2190 \u2192", "on a chart: move the cursor"], ["+ \u2212", "on a chart: zoom"], ["t", "light, dark or as the system has it"],
  ["Esc", "close what is open, leave the filter"], ["?", "this help"],
];

/** What survives a reload, where the browser keeps anything. */
const kept = {
  get(key, otherwise) { try { return localStorage.getItem(`loopkit-${key}`) ?? otherwise; } catch { return otherwise; } },
  set(key, value) { try { localStorage.setItem(`loopkit-${key}`, value); } catch { /* a report from disk */ } },
};

export const data = new Data(makeSource());
let at = emptyState();
let home = null; // the workspace
let view = null; // of the open tab: what it is of, and how to end it
let homeAddress = "#/"; // where the workspace was left

// --- theme

let theme = THEMES.includes(kept.get("theme", "auto")) ? kept.get("theme", "auto") : "auto";
const themeButton = button({ class: "quiet" }, () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3]), );

function setTheme(name) {
  theme = name;
  kept.set("theme", name);
  document.documentElement.toggleAttribute("data-theme", name !== "auto");
  if (name !== "auto") document.documentElement.dataset.theme = name;
  themeButton.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[name];
  themeButton.setAttribute("aria-label", `Colors: ${themeButton.textContent}. Change`);
  window.dispatchEvent(new Event("theme"));
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("theme")));

// --- frame

const connection = h("span", { class: "state", role: "status" });
const banner = h("div", { class: "banner", role: "alert", hidden: true });
const help = h("dialog", { "aria-label": "Keyboard" }, h("h2", {}, "Keyboard"),
  h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, key.split(" ").map((each) => h("kbd", {}, each))), h("dd", {}, what)])),
  button({}, () => help.close(), "Close"));
const main = h("main", { tabindex: -1 });
const brand = h("a", { class: "brand", href: "#/" }, h("span", { class: "mark", "aria-hidden": "true" }), "loopkit", muted(data.source.live ? "monitor" : "report"));
const helpButton = button({ class: "quiet", "aria-label": "Keyboard help" }, () => help.showModal(), "?");
document.getElementById("app").append(h("header", { class: "top" }, brand, connection, themeButton, helpButton), banner, main, help);
help.addEventListener("click", (event) => { if (event.target === help) help.close(); });

const put = (element, text) => { if (element.textContent !== text) element.textContent = text; };
const title = (run) => (run.name === "." ? "run" : run.name); // the folder that is shown is the run

// --- location

/** Change the state; the address says it. Another page is a step that the browser can go back. */
function change(changes, step = false) {
  at = { ...at, ...changes };
  const to = writeState(at);
  if (at.page === "home") homeAddress = to;
  if (step) location.hash = to;
  else history.replaceState(null, "", to);
}

function go(changes) {
  const to = { ...at, ...changes };
  to.with = to.with.filter((id) => id !== to.id);
  location.hash = writeState(to);
}

window.addEventListener("hashchange", () => { closePopovers(); at = readState(location.hash); if (at.page === "home") { homeAddress = writeState(at); endHome(); } open(); });

/** Lay a run over the open one, or take it away. */
function overlay(id) {
  const over = at.with.includes(id) ? at.with.filter((each) => each !== id) : [...at.with, id].slice(-MOST_OVERLAID);
  go({ with: over, tab: TABS.find((tab) => tab.id === at.tab)?.several ? at.tab : "metrics" });
}

// --- the run

let head = null;

async function open() {
  document.body.className = at.page;
  document.title = at.page === "run" ? `${data.runs.get(at.id)?.name ?? at.id}, loopkit` : "loopkit monitor";
  if (at.page === "home") { drawHome(); return; }
  endHome();
  if (!TABS.some((tab) => tab.id === at.tab)) at.tab = "metrics";
  const mine = [at.id, ...at.with.slice(0, MOST_OVERLAID)];
  const missing = mine.filter((id) => !data.details.has(id));
  if (missing.length) {
    if (!data.details.has(at.id)) { endView(); head = null; main.replaceChildren(h("p", { class: "loading" }, "Reading the log")); }
    const asked = at;
    const answers = await Promise.allSettled(missing.map((id) => data.open(id)));
    if (asked !== at) return;
    const failed = answers.find((answer, place) => answer.status === "rejected" && missing[place] === at.id);
    if (failed) {
      endView();
      main.replaceChildren(h("div", { class: "empty" }, h("h1", {}, failed.reason.status === 404 ? "There is no such run" : "The run could not be read"), h("p", {}, `${failed.reason.message}.`),
        button({}, open, "Try again"), h("a", { href: homeAddress }, "All runs")));
      return;
    }
  }
  drawRun();
}

function drawHome() {
  endView();
  head = null;
  if (home) { home.refresh(); return; }
  home = new Workspace(data, () => at, (changes) => change(changes));
  main.replaceChildren(home.element);
}

function endHome() {
  home?.end();
  home = null;
}

function endView() {
  view?.end?.();
  view = null;
}

function context() {
  const ids = [at.id, ...at.with].filter((id) => data.details.has(id));
  return { data, state: () => at, change: (changes) => { change(changes); view?.zoomed?.(); }, details: ids.map((id) => data.details.get(id)), style: (id) => ({ color: `--s${Math.max([at.id, ...at.with].indexOf(id), 0) % 8}`, dash: 0 }) };
}

function makeHead() {
  const part = (label, about) => {
    const value = h("dd", {});
    return { value, element: h("div", { title: about }, h("dt", {}, label), value) };
  };
  const made = { id: at.id, name: h("h1", {}), status: h("span", { class: "chip" }), path: h("span", { class: "muted path" }), tags: h("span", {}), note: h("div", { class: "note" }),
    step: part("step", "training steps"), epoch: part("epoch", "the one that is running or was the last, from 1"), took: part("elapsed", "from the first line of the log to the last"), left: part("time left"), speed: part("steps/s", "as measured last"), samples: part("samples/s", "as measured last"), when: part("updated"), commit: part("commit", "of the script's repository"),
    pick: h("span", { class: "pick" }), fill: h("span", {}), trouble: h("div", { class: "trouble" }), laid: h("div", { class: "laid" }), content: h("div", { class: "content", id: "content", role: "tabpanel", tabindex: -1 }) };
  made.edit = popover("Edit", (close) => editor(at.id, close), { class: "small" });
  made.progress = h("div", { class: "progress", role: "progressbar", "aria-label": "steps", "aria-valuemin": 0, "aria-valuemax": 100 }, made.fill);
  made.tabs = TABS.map((tab) => {
    const note = h("span", { class: "count" });
    const made = button({ role: "tab", id: `tab-${tab.id}`, "aria-controls": "content" }, () => go({ tab: tab.id }), tab.label, note);
    return { tab, note, button: made };
  });
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the run" }, made.tabs.map(({ button }) => button));
  tabs.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) { event.preventDefault(); nextTab(by); made.tabs.find(({ tab }) => tab.id === readState(location.hash).tab).button.focus(); }
  });
  main.replaceChildren(h("div", { class: "head" },
    h("div", { class: "title" }, h("a", { class: "back", href: homeAddress, "aria-label": "All runs" }, "\u2039 Runs"), made.name, made.status, made.path, made.tags, data.source.live ? made.edit.element : null, made.pick),
    made.note,
    h("dl", { class: "facts" }, [made.step, made.epoch, made.took, made.left, made.speed, made.samples, made.when, made.commit].map(({ element }) => element)),
    made.progress, made.laid), made.trouble, tabs, made.content);
  return made;
}

/** What people note about a run: in a file beside its log. */
function editor(id, close) {
  const notes = data.runs.get(id)?.notes ?? {}, trouble = h("p", { class: "notice bad", role: "alert", hidden: true });
  const name = h("input", { type: "text", value: notes.name ?? "", maxlength: 200, placeholder: id, "aria-label": "Name" }), tags = h("input", { type: "text", value: (notes.tags ?? []).join(", "), placeholder: "baseline, paper", "aria-label": "Tags, with commas between them" });
  const note = h("textarea", { rows: 6, maxlength: 20000, placeholder: "Markdown", "aria-label": "Note" });
  note.value = notes.note ?? "";
  const send = async (changes) => {
    try { await data.note(id, changes); close(); drawHead(); } catch (failure) { trouble.hidden = false; trouble.textContent = `Not saved: ${failure.message}.`; }
  };
  return h("form", { class: "editor", on: { submit: (event) => { event.preventDefault(); send({ name: name.value, note: note.value, tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean) }); } } },
    h("label", {}, "Name", name), h("label", {}, "Tags", tags), h("label", {}, "Note", note), trouble,
    toolbar(h("button", { type: "submit", class: "strong" }, "Save"),
      button({}, () => send({ archived: !notes.archived }), notes.archived ? "Take out of the archive" : "Archive")));
}

function nextTab(by) {
  const here = TABS.findIndex((tab) => tab.id === at.tab);
  go({ tab: TABS[(here + by + TABS.length) % TABS.length].id });
}

function drawRun() {
  if (head?.id !== at.id) { endView(); head = makeHead(); }
  const here = context(), [detail] = here.details;
  drawHead();
  head.laid.replaceChildren(...(at.with.length ? [at.id, ...at.with].map((id, place) => h("span", { class: "laid-run" }, dot(`--s${place % 8}`),
    data.runs.get(id)?.name ?? id, place ? button({ class: "quiet small", "aria-label": `Take ${id} away` }, () => overlay(id), "\u00d7") : null)) : []));
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
  const key = JSON.stringify([at.tab, tab.several ? [at.id, ...at.with] : at.id, tab.key(here)]);
  if (view?.key === key) { view.update?.(here); return; }
  const same = view?.tab === at.tab && view.id === at.id;
  const scrolled = main.scrollTop;
  endView();
  view = { key, tab: at.tab, id: at.id, ...tab.make(here) };
  head.content.setAttribute("aria-labelledby", `tab-${at.tab}`);
  head.content.replaceChildren(view.element);
  if (same) main.scrollTop = scrolled;
}

/** Choose a run to lay over this one. */
function picker() {
  const others = [...data.runs.values()].filter((run) => run.id !== at.id && !at.with.includes(run.id) && !run.notes?.archived).sort((a, b) => b.updated - a.updated).slice(0, 500);
  if (!others.length || at.with.length >= MOST_OVERLAID) return "";
  const select = h("select", { "aria-label": "Compare with another run" }, h("option", { value: "" }, "Compare with\u2026"), others.map((run) => h("option", { value: run.id }, run.name)));
  select.addEventListener("change", () => { if (select.value) overlay(select.value); });
  return select;
}

function drawHead() {
  const run = data.runs.get(at.id) ?? data.details.get(at.id);
  if (!head || !run || head.id !== at.id) return;
  const metrics = { ...data.details.get(at.id)?.metrics, ...run.metrics }, live = run.status === "live";
  const took = run.updated - run.started, steps = run.total_steps, notes = run.notes ?? {};
  put(head.name, title(run));
  put(head.path, run.id === run.name || run.id === "." ? "" : run.id);
  put(head.status, run.status);
  head.status.dataset.status = run.status;
  const tags = [...(notes.tags ?? []), ...(notes.archived ? ["archived"] : [])];
  if (head.tags.textContent !== tags.join("")) head.tags.replaceChildren(...tags.map((tag) => h("span", { class: "tag" }, tag)));
  if (head.noted !== (notes.note ?? "")) { head.noted = notes.note ?? ""; head.note.replaceChildren(head.noted ? markdown(head.noted) : ""); }
  put(head.step.value, steps ? `${count(run.step)} / ${count(steps)}` : count(run.step));
  put(head.epoch.value, run.planned_epochs ? `${count(run.epoch)} / ${count(run.planned_epochs)}` : count(run.epoch));
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
  head.commit.element.hidden = !run.git;
  put(head.commit.value, run.git ? `${run.git.commit.slice(0, 8)}${run.git.dirty ? ", changed" : ""}` : "");
  head.progress.hidden = !steps;
  if (steps) {
    const done = Math.min(run.step / steps, 1) * 100;
    head.fill.style.width = `${done}%`;
    head.progress.setAttribute("aria-valuenow", done.toFixed(0));
    head.progress.dataset.status = run.status;
  }
}

// --- what happens

const headSoon = seldom(drawHead, 100);
const runSoon = seldom(() => { if (at.page === "run" && head?.id === at.id && data.details.has(at.id)) drawRun(); }, 50);

data.addEventListener("list", () => {
  drawState();
  headSoon();
  home?.refresh();
});
data.addEventListener("run", ({ detail: { id } }) => { if (id === at.id) headSoon(); });
data.addEventListener("detail", ({ detail: { id } }) => { if (id === at.id || at.with.includes(id)) runSoon(); });
data.addEventListener("state", drawState);

function drawState() {
  if (!data.source.live) { connection.textContent = ""; return; }
  connection.dataset.state = data.state;
  connection.textContent = { loading: data.seq === undefined ? "loading" : "connecting", open: "connected", lost: "not connected", refused: "refused" }[data.state];
  banner.hidden = data.state === "open" || data.state === "loading";
  banner.textContent = data.state === "refused" ? "The server wants its token: open the address that loopkit monitor has printed."
    : "The server is gone. What is shown is its last answer; the page continues by itself when it is back.";
}

setInterval(() => { drawHead(); home?.refresh(); }, 15_000);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = event.target.closest?.("input:not([type=checkbox]):not([type=range]), select, textarea");
  if (event.key === "Escape" && event.target.id === "search") { event.target.value = ""; home?.change({ q: "" }); event.target.blur(); return; }
  if (event.target.id === "search" && event.key === "ArrowDown") { home?.walk(0); event.preventDefault(); return; }
  if (typing) return;
  const press = {
    "/": () => { if (at.page === "run") location.hash = homeAddress; setTimeout(() => { document.getElementById("search")?.focus(); document.getElementById("search")?.select(); }, at.page === "run" ? 60 : 0); },
    "?": () => help.showModal(),
    "[": () => { if (at.page === "run") nextTab(-1); },
    "]": () => { if (at.page === "run") nextTab(1); },
    x: () => home?.toggleFocused(),
    o: () => home?.isolateFocused(),
    t: () => themeButton.click(),
    s: () => document.getElementById("smooth")?.focus(),
    l: () => document.getElementById("log")?.click(),
    0: () => document.getElementById("all")?.click(),
    ArrowDown: () => { if (!home || event.target.closest("input, [role=application], [role=treegrid]")) return false; home.walk(1); return true; },
    ArrowUp: () => { if (!home || event.target.closest("input, [role=application], [role=treegrid]")) return false; home.walk(-1); return true; },
  }[event.key];
  if (press && press() !== false) event.preventDefault();
});

setTheme(theme);
at = readState(location.hash);
if (at.page === "home") homeAddress = writeState(at);
document.body.className = at.page;
drawState();
if (at.page === "home") drawHome();
await data.begin();
if (!data.source.live && at.page === "home" && data.runs.size === 1 && !location.hash) {
  at = { ...at, page: "run", id: [...data.runs.keys()][0] };
  history.replaceState(null, "", writeState(at));
}
drawState();
await open();
