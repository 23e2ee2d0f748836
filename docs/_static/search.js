// Ctrl-K (on a Mac Command-K) goes to the search field; where the sidebar is hidden, to the search page.
document.addEventListener("DOMContentLoaded", () => {
  const field = document.querySelector("input.sidebar-search");
  if (field) field.placeholder = /Mac/.test(navigator.platform) ? "Search (⌘K)" : "Search (Ctrl-K)";
  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey || event.key.toLowerCase() !== "k") return;
    event.preventDefault();
    const seen = field && field.getBoundingClientRect();
    if (seen && seen.width && seen.right > 0) {
      field.focus();
      field.select();
    } else {
      location.href = document.documentElement.dataset.content_root + "search.html";
    }
  });
});
