"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");

  // Theme: the system's unless the reader chose; the choice is kept where the browser allows it.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const relabel = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  try {
    const kept = localStorage.getItem("covary-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* storage is off for this page */ }
  button.setAttribute("aria-label", "Switch between dark and light colours");
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("covary-theme", root.dataset.theme); } catch { /* as above */ }
    relabel();
  });
  system.addEventListener("change", relabel);
  relabel();

  // Refusing to answer.
  const data = JSON.parse(document.getElementById("curves").textContent);
  const classifies = data.task === "classification";
  const slider = document.getElementById("coverage");
  const readout = document.getElementById("readout");
  const holder = document.getElementById("curve");
  const explorer = document.getElementById("explorer");
  explorer.hidden = false;

  const n = data.samples;
  const whole = (value) => value.toLocaleString("en-US");
  const minus = (text) => text.replace(/-/g, "\u2212");
  const precise = (value) => minus(value.toPrecision(4));
  // As words.percent: never 100% of what is not quite all.
  const percent = (part, all, decimals = 1) => {
    if (!all) return "\u2013";
    const share = (100 * part) / all;
    const least = 10 ** -decimals;
    if (share === 0 || share === 100) return `${share}%`;
    if (share > 100 - least / 2) return `>${(100 - least).toFixed(decimals)}%`;
    if (share < least / 2) return `<${least.toFixed(decimals)}%`;
    return `${share.toFixed(decimals)}%`;
  };
  const risk = (loss, count) => (classifies ? loss / count : Math.sqrt(loss / count));
  const number = (name) => Number(explorer.querySelector(`input[name=${name}]:checked`).value);
  const comparable = () => data.scores.filter((score) => score.target === number("target"));
  const chosen = () => comparable()[number("score")];

  function rule(score, threshold) {
    if (score.score === "calibrated" || score.score === "max_softmax") {
      const probability = threshold < 1e-4 ? `1 \u2212 ${minus(threshold.toExponential(1))}` : (1 - threshold).toFixed(4);
      return `${score.label} \u2265 ${probability}`;
    }
    return `${score.label} \u2264 ${precise(threshold)}${score.label.includes("entropy") ? " nats" : ""}`;
  }

  function ruleAt(score, at) {
    if (score.threshold[at] !== null) return rule(score, score.threshold[at]);
    return at === 0 ? `${score.label} of \u2212\u221e` : "no limit";
  }

  // Where the threshold lies that held-out inputs gave: the last place that does not exceed it.
  function recommendedAt(score) {
    let at = 0;
    score.threshold.forEach((threshold, i) => {
      if (threshold !== null && threshold <= score.recommended) at = i;
    });
    return at;
  }

  function facts(score, at) {
    const answered = score.answered[at];
    const refused = n - answered;
    const loss = score.loss[at];
    const left = Math.max(0, score.loss[score.loss.length - 1] - loss);
    const rows = [
      ["threshold", "Answers where", ruleAt(score, at), ""],
      ["answered", "Answers", percent(answered, n), `${whole(answered)} of ${whole(n)}`],
    ];
    if (classifies) {
      rows.push(["right", "Right among the answered", percent(answered - loss, answered, 2), `${whole(answered - loss)} of ${whole(answered)}`]);
      rows.push(["refused", "Right among the refused", percent(refused - left, refused, 2), refused ? `${whole(refused - left)} of ${whole(refused)}` : "none refused"]);
    } else {
      const total = score.loss[score.loss.length - 1];
      rows.push(["rmse", "RMSE of the answered", precise(risk(loss, answered)), `all: ${precise(risk(total, n))}`]);
      rows.push(["refused", "RMSE of the refused", refused ? precise(risk(left, refused)) : "\u2013", refused ? `${whole(refused)} inputs` : "none refused"]);
    }
    data.ood.forEach((part, i) => {
      const taken = score.ood[i][at];
      rows.push([`ood-${i}`, `Out-of-distribution inputs answered: ${part.name}`, percent(taken, part.samples), `${whole(taken)} of ${whole(part.samples)}`]);
    });
    return rows;
  }

  function say(score, at) {
    const list = document.createElement("dl");
    for (const [key, title, value, count] of facts(score, at)) {
      const row = list.appendChild(document.createElement("div"));
      row.dataset.key = key;
      row.appendChild(document.createElement("dt")).textContent = title;
      const cell = row.appendChild(document.createElement("dd"));
      const main = cell.appendChild(document.createElement("span"));
      main.className = key === "threshold" ? "rule" : "share";
      main.textContent = value;
      if (count) {
        cell.append(" ");
        const small = cell.appendChild(document.createElement("span"));
        small.className = "count";
        small.textContent = count;
      }
    }
    readout.replaceChildren(list);
    readout.dataset.at = at;
    slider.setAttribute("aria-valuetext", `answers ${percent(score.answered[at], n)} of the inputs`);
  }

  // The chart, drawn anew whenever its width changes, so that text keeps its size.
  const make = (name, attributes, parent) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return parent ? parent.appendChild(element) : element;
  };
  function limitOf(scores) {
    // The first few inputs make a rate of 0 or 100%; they must not set the scale.
    let most = 0;
    for (const score of scores) {
      score.answered.forEach((count, i) => {
        if (count > 0.05 * n) most = Math.max(most, risk(score.loss[i], count));
      });
    }
    return 1.15 * most || (classifies ? 0.05 : 1);
  }

  function ticks(limit) {
    const rough = limit / 5;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    return Array.from({ length: Math.floor(limit / step + 1e-9) + 1 }, (_, i) => i * step);
  }

  let place = null; // of the plot within the chart: {x, y} from data to pixels, and back

  function draw() {
    const score = chosen();
    const width = holder.clientWidth;
    const height = Math.max(220, Math.min(330, 0.56 * width));
    const box = { left: 52, right: width - 12, top: 30, bottom: height - 40 };
    const limit = limitOf(comparable());
    const x = (share) => box.left + share * (box.right - box.left);
    const y = (value) => box.bottom - (Math.min(value, limit) / limit) * (box.bottom - box.top);
    place = { x, y, share: (pixel) => (pixel - box.left) / (box.right - box.left) };
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    svg.setAttribute("aria-label", `${classifies ? "Error rate" : "RMSE"} of the answered inputs against the part that is answered; the numbers at the slider follow.`);
    for (const value of ticks(limit)) {
      make("line", { class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value) }, svg);
      const label = make("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, svg);
      label.textContent = classifies ? `${Number((100 * value).toPrecision(6))}%` : minus(Number(value.toPrecision(6)).toString());
    }
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const label = make("text", { x: x(share), y: box.bottom + 18, "text-anchor": share === 1 ? "end" : "middle" }, svg);
      label.textContent = `${100 * share}%`;
    }
    make("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, svg)
      .textContent = "inputs answered, the most certain first";
    make("text", { x: 0, y: 12 }, svg).textContent = classifies ? "wrong among the answered" : "RMSE of the answered";
    const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
    const all = risk(score.loss[score.loss.length - 1], n);
    make("path", { class: "line chance", d: path([[0, all], [1, all]]) }, svg);
    if (classifies) {
      const best = Array.from({ length: 101 }, (_, i) => [i / 100, i ? Math.max(0, 1 - (1 - all) / (i / 100)) : 0]);
      make("path", { class: "line best", d: path(best) }, svg);
    }
    // The chosen score last, above the others.
    for (const each of [...comparable().filter((other) => other !== score), score]) {
      const points = each.answered.map((count, at) => [count / n, risk(each.loss[at], count)]);
      make("path", { class: each === score ? "line chosen" : "line other", d: path(points) }, svg);
    }
    if (score.recommended !== null) {
      const at = x(score.answered[recommendedAt(score)] / n);
      make("line", { class: "advised", x1: at, x2: at, y1: box.top, y2: box.bottom }, svg);
    }
    make("line", { class: "here", id: "here", y1: box.top, y2: box.bottom }, svg);
    make("circle", { id: "dot", r: 6 }, svg);
    holder.replaceChildren(svg, legend());
    move();
  }

  function legend() {
    const list = document.createElement("ul");
    list.className = "key";
    const score = chosen();
    const entries = [["chosen", score.label]];
    if (comparable().length > 1) entries.push(["other", "other scores"]);
    if (classifies) entries.push(["best", "best possible"]);
    entries.push(["chance", "refusing at random"]);
    if (score.recommended !== null) entries.push(["advised", "recommended"]);
    for (const [style, text] of entries) {
      const entry = list.appendChild(document.createElement("li"));
      const sample = make("svg", { viewBox: "0 0 30 8", "aria-hidden": "true" }, entry);
      make("path", { class: `line ${style}`, d: "M0,4H30" }, sample);
      entry.append(text);
    }
    return list;
  }

  function move() {
    const score = chosen();
    const at = Number(slider.value);
    const share = score.answered[at] / n;
    const value = risk(score.loss[at], score.answered[at]);
    const line = holder.querySelector("#here");
    line.setAttribute("x1", place.x(share));
    line.setAttribute("x2", place.x(share));
    const dot = holder.querySelector("#dot");
    dot.setAttribute("cx", place.x(share));
    dot.setAttribute("cy", place.y(value));
    say(score, at);
  }

  function goTo(share) {
    const counts = chosen().answered;
    slider.max = counts.length - 1;
    let nearest = 0;
    counts.forEach((count, i) => {
      if (Math.abs(count / n - share) < Math.abs(counts[nearest] / n - share)) nearest = i;
    });
    slider.value = nearest;
  }

  const advice = document.getElementById("advice");
  const without = advice.textContent;
  const back = document.getElementById("recommended");
  function advise() {
    const score = chosen();
    slider.max = score.threshold.length - 1;
    back.hidden = score.recommended === null;
    advice.textContent = without;
    if (score.recommended === null) return goTo(0.85);
    advice.textContent = `Recommended: ${rule(score, score.recommended)}. It answers ${percent(data.answered, 1, 0)} of the ${whole(data.held_out)} held-out training inputs; no test input was looked at to choose it.`;
    slider.value = recommendedAt(score);
  }

  slider.addEventListener("input", move);
  back.addEventListener("click", () => { advise(); move(); });
  explorer.addEventListener("change", (event) => {
    if (event.target.type === "radio") { advise(); draw(); }
  });
  const point = (event) => {
    if (event.type === "pointermove" && !event.buttons) return;
    goTo(place.share(event.clientX - holder.getBoundingClientRect().left));
    move();
  };
  holder.addEventListener("pointerdown", point);
  holder.addEventListener("pointermove", point);
  advise();
  let width = 0;
  new ResizeObserver(() => {
    // On paper the chart is not shown and has no width.
    if (holder.clientWidth && holder.clientWidth !== width) { width = holder.clientWidth; draw(); }
  }).observe(holder);
})();
