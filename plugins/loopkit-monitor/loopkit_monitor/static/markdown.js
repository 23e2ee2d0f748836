// Text of a log or a note as Markdown. It makes elements of text, never markup of data; links lead to http and https.

import { h } from "./dom.js";

const INLINE = /(`[^`]+`)|(\*\*[^*]+\*\*)|(__[^_]+__)|(\*[^*\s][^*]*\*)|(\[[^\]]+\]\(https?:\/\/[^\s)]+\))|(https?:\/\/[^\s<>"')]+)/g;

function inline(text) {
  const made = [];
  let from = 0;
  for (const found of text.matchAll(INLINE)) {
    if (found.index > from) made.push(text.slice(from, found.index));
    const [all, code, strong, under, soft, link] = found;
    if (code) made.push(h("code", {}, code.slice(1, -1)));
    else if (strong ?? under) made.push(h("strong", {}, all.slice(2, -2)));
    else if (soft) made.push(h("em", {}, soft.slice(1, -1)));
    else {
      const [, label, address] = link ? /^\[([^\]]+)\]\((.+)\)$/.exec(all) : [null, all, all];
      made.push(h("a", { href: address, rel: "noreferrer noopener", target: "_blank" }, label));
    }
    from = found.index + all.length;
  }
  if (from < text.length) made.push(text.slice(from));
  return made;
}

const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
const LIST = /^\s*([-*+]|\d+[.)])\s+(.*)$/;

/** The elements of a text. */
export function markdown(text) {
  const lines = String(text).replace(/\r\n?/g, "\n").split("\n"), made = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at], heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (/^\s*$/.test(line)) { at += 1; continue; }
    if (/^```/.test(line)) {
      const from = at + 1;
      at = from;
      while (at < lines.length && !/^```/.test(lines[at])) at += 1;
      made.push(h("pre", {}, lines.slice(from, at).join("\n")));
      at += 1;
      continue;
    }
    if (heading) { made.push(h("p", { class: "heading", role: "heading", "aria-level": Math.min(heading[1].length + 2, 6) }, inline(heading[2]))); at += 1; continue; }
    if (/^\s*\|.*\|\s*$/.test(line) && /^\s*\|[\s:|-]+\|\s*$/.test(lines[at + 1] ?? "")) {
      const head = cellsOf(line), rows = [];
      at += 2;
      while (at < lines.length && /^\s*\|.*\|\s*$/.test(lines[at])) { rows.push(cellsOf(lines[at])); at += 1; }
      made.push(h("table", {}, h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, inline(cell))))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, inline(cell))))))));
      continue;
    }
    if (LIST.test(line)) {
      const items = [], ordered = /^\s*\d/.test(line);
      while (at < lines.length && LIST.test(lines[at])) { items.push(LIST.exec(lines[at])[2]); at += 1; }
      made.push(h(ordered ? "ol" : "ul", { class: "items" }, items.map((item) => h("li", {}, inline(item)))));
      continue;
    }
    if (/^>\s?/.test(line)) { made.push(h("blockquote", {}, inline(line.replace(/^>\s?/, "")))); at += 1; continue; }
    const from = at;
    while (at < lines.length && !/^\s*$/.test(lines[at]) && !/^(#{1,6}\s|```|>)/.test(lines[at]) && !(LIST.test(lines[at]) && at > from)) at += 1;
    made.push(h("p", {}, lines.slice(from, at).flatMap((each, place) => [place ? h("br") : null, inline(each)])));
  }
  return h("div", { class: "markdown" }, made);
}
