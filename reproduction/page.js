// The table of claims, filtered. Without this it is a plain table, and the controls are hidden.
(() => {
  const form = document.getElementById("filter");
  const table = document.getElementById("all-claims");
  const rows = [...table.tBodies[0].rows];
  const said = document.getElementById("filtered");
  const texts = rows.map((row) => row.textContent.toLowerCase());

  function show() {
    const { verdict, experiment, whose, words } = Object.fromEntries(new FormData(form));
    const asked = words.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    rows.forEach((row, i) => {
      const shown =
        (!verdict || row.dataset.verdict === verdict) &&
        (!experiment || row.dataset.experiment === experiment) &&
        (!whose || row.dataset.whose === whose) &&
        asked.every((word) => texts[i].includes(word));
      row.hidden = !shown;
      count += shown;
    });
    said.textContent = `${count} of ${rows.length} rows`;
    table.classList.toggle("empty", count === 0);
  }

  form.hidden = false;
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(show));
  // A link to the claims of one experiment or verdict asks for these alone.
  document.querySelectorAll("a[data-filter]").forEach((link) =>
    link.addEventListener("click", (event) => {
      const asked = [...new URLSearchParams(link.dataset.filter)];
      event.preventDefault();
      form.reset();
      asked.forEach(([name, value]) => (form.elements[name].value = value));
      show();
      document.getElementById("claims").scrollIntoView();
      form.elements[asked[0][0]].focus({ preventScroll: true });
    })
  );
  show();
})();
