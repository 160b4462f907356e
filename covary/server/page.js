"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;

  // Theme: the system's unless the reader chose, as on the pages of reports.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const button = $("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const relabel = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  const stored = (storage, name, value) => {
    try { return value === undefined ? storage().getItem(name) : storage().setItem(name, value); } catch { return null; }
  };
  const kept = stored(() => localStorage, "covary-theme");
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.setAttribute("aria-label", "Switch between dark and light colours");
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    stored(() => localStorage, "covary-theme", root.dataset.theme);
    relabel();
  });
  system.addEventListener("change", relabel);
  relabel();

  // Elements. All that comes from the server becomes text, never markup.
  const make = (name, attributes = {}, ...content) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") element.className = value;
      else if (typeof value === "boolean") element.toggleAttribute(key, value);
      else element.setAttribute(key, value);
    }
    element.append(...content);
    return element;
  };
  const draw = (name, attributes, parent, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return parent ? parent.appendChild(element) : element;
  };
  const minus = (text) => String(text).replace(/^-/, "\u2212");
  // To as many digits as the error bar is worth; thousands with commas.
  const number = (value, std) => {
    if (value === null || !Number.isFinite(value)) return "unknown";
    const unit = Math.floor(Math.log10(std > 0 ? std : Math.abs(value) || 1));
    if (Math.abs(value) >= 1e9 || unit < -6) return minus(value.toPrecision(4));
    const digits = Math.max(0, Math.min(6, 1 - unit));
    return minus(value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  };
  const percent = (share) => {
    if (share > 0 && share < 0.001) return "<0.1%";
    if (share < 1 && share > 0.999) return ">99.9%";
    return `${(100 * share).toFixed(1)}%`;
  };

  // The server.
  const say = (sentence) => { $("trouble").textContent = sentence; $("trouble").hidden = !sentence; };
  async function ask(path, body) {
    const headers = {};
    const token = stored(() => sessionStorage, "covary-token");
    if (token) headers.Authorization = `Bearer ${token}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body: body && JSON.stringify(body), signal: AbortSignal.timeout(20000) });
    } catch {
      throw { status: 0, sentence: "The server does not answer. This page asks again until it does." };
    }
    const content = await response.json().catch(() => ({ error: `The server answered with status ${response.status}.` }));
    if (!response.ok) throw { status: response.status, sentence: content.error };
    return content;
  }

  let schema = null;
  let body = () => null; // what to ask: set by the form or the drawing
  let isBusy = false, isAsked = false, later = 0;
  // One request at a time; what changed meanwhile is asked about when it is back.
  async function update() {
    isAsked = true;
    if (isBusy) return;
    isBusy = true;
    clearTimeout(later);
    while (isAsked) {
      isAsked = false;
      const wanted = body();
      if (wanted === null) { $("outputs").replaceChildren(make("p", { class: "note" }, "Draw, or choose a picture: the answer comes as you do.")); break; }
      try {
        const reply = await ask("explain", wanted);
        say(reply.model === schema.model ? "" : "The server has a new model since this page was opened: load the page again.");
        show(reply);
        $("outputs").classList.remove("old");
      } catch (error) {
        if (!("status" in error)) throw error;
        $("outputs").classList.add("old");
        say(error.sentence);
        if (error.status === 401) { isBusy = false; return lock(); }
        if ([0, 429, 503].includes(error.status)) later = setTimeout(update, 1500);
      }
    }
    isBusy = false;
  }

  // The answer.
  function show(reply) {
    const row = reply.predictions[0];
    const asks = row.flag !== "answer";
    const verdict = make("p", { class: `verdict${asks ? " ask" : ""}`, id: "verdict" },
      make("b", {}, asks ? "Ask someone" : "Answer"),
      make("span", {}, asks ? row.reason : "It is among the surest, as said below, and the input is like those of training."));
    const parts = schema.task === "classification" ? [classes(row)] : reply.explanation.map((target) => regression(row, target));
    const more = reply.explanation.map((one) => variance(one));
    const blocks = parts.flatMap((part, i) => (schema.task === "classification" ? [part] : [part, more[i]]));
    if (schema.task === "classification") blocks.push(more[0]);
    const limit = schema.limit >= 0.005 ? `up to ${schema.limit.toPrecision(2)} is` : "0 is";
    const far = make("p", { class: "note", id: "novelty" }, `Distance from the training data: ${row.novelty === null ? "beyond all numbers" : number(row.novelty, 0.1)} standard deviations of a ${schema.kind === "table" ? "column" : "pixel"}; ${limit} like training.`);
    $("outputs").replaceChildren(verdict, ...blocks, far);
  }

  function regression(row, target) {
    const key = schema.targets.length > 1 ? (name) => row[`${name}_${target.name}`] : (name) => row[name];
    const [mean, std, low, high] = ["prediction", "std", "low", "high"].map(key);
    const box = make("div", { class: "target" });
    box.append(make("h3", {}, target.name));
    const said = make("p", { class: "said" }, make("b", { class: "prediction" }, number(mean, std)), " ");
    said.append(make("span", { class: "std" }, `\u00b1 ${number(std, std)}`));
    box.append(said, make("p", { class: "note interval" }, `${Math.round(1000 * schema.level) / 10}% of such targets lie from ${number(low, std)} to ${number(high, std)}.`));
    box.append(density(target, mean, low, high, std));
    return box;
  }

  function ticks(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const first = Math.ceil(low / step) * step;
    return { step, places: Array.from({ length: Math.floor((high - first) / step + 1e-9) + 1 }, (_, i) => first + i * step) };
  }

  function density(target, mean, low, high, std) {
    const known = schema.targets.find((each) => each.name === target.name);
    const width = Math.max(240, Math.min(560, $("outputs").clientWidth - 40)), height = 150, bottom = 112;
    const x = target.x, y = target.density;
    // The axis stays where the targets of training are, unless the distribution leaves them.
    const from = Math.min(known.mean - 3 * known.std, x[0]), to = Math.max(known.mean + 3 * known.std, x[x.length - 1]);
    const most = Math.max(...y);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Density of ${target.name}: from ${number(low, std)} to ${number(high, std)} with the probability of the interval` });
    if (!(most > 0) || !Number.isFinite(to - from)) return svg;
    const px = (value) => (width * (value - from)) / (to - from), py = (value) => bottom - (104 * value) / most;
    const at = (i) => `${px(x[i]).toFixed(1)},${py(y[i]).toFixed(1)}`;
    const outline = x.map((_, i) => at(i)).join("L");
    draw("path", { class: "density", d: `M${px(x[0]).toFixed(1)},${bottom}L${outline}L${px(x[x.length - 1]).toFixed(1)},${bottom}Z` }, svg);
    const inner = x.map((_, i) => i).filter((i) => x[i] >= low && x[i] <= high);
    if (inner.length) draw("path", { class: "inside", d: `M${px(x[inner[0]]).toFixed(1)},${bottom}L${inner.map(at).join("L")}L${px(x[inner[inner.length - 1]]).toFixed(1)},${bottom}Z` }, svg);
    draw("path", { class: "outline", d: `M${outline}` }, svg);
    draw("line", { class: "centre", x1: px(mean), x2: px(mean), y1: 4, y2: bottom }, svg);
    draw("line", { class: "axis", x1: 0, x2: width, y1: bottom, y2: bottom }, svg);
    const left = px(known.mean - 2 * known.std), right = px(known.mean + 2 * known.std);
    draw("rect", { class: "usual", x: left, width: Math.max(1, right - left), y: bottom + 1, height: 4, rx: 2 }, svg);
    const { step, places } = ticks(from, to, Math.max(3, width / 90));
    for (const place of places) {
      if (px(place) < 14 || px(place) > width - 14) continue;
      draw("text", { x: px(place), y: bottom + 20, "text-anchor": "middle" }, svg, number(place, 10 * step));
    }
    draw("text", { x: width / 2, y: height - 1, "text-anchor": "middle" }, svg, `${target.name} (grey: most targets of training)`);
    return svg;
  }

  function classes(row) {
    const box = make("div", {});
    box.append(make("p", { class: "said" }, make("b", { class: "prediction" }, row.prediction), " ", make("span", { class: "std" }, percent(row.probability))));
    const every = Object.entries(row.probabilities);
    // Few classes stay in their order, so that bars do not jump.
    const some = every.length > 12 ? every.sort((a, b) => b[1] - a[1]).slice(0, 10) : schema.classes.map((name) => [name, row.probabilities[name]]);
    const list = make("dl", { class: "classes" });
    for (const [name, share] of some) {
      const bar = make("i", { class: row.set.includes(name) ? "in" : "" });
      bar.style.width = `${100 * share}%`;
      list.append(make("dt", {}, name), make("dd", { class: "bar", "aria-hidden": "true" }, bar), make("dd", { class: "n" }, percent(share)));
    }
    box.append(list, make("p", { class: "note" }, `Blue: labels to reckon with. ${Math.round(1000 * schema.level) / 10}% of such ${schema.kind === "table" ? "rows" : "images"} have theirs among them.`));
    return box;
  }

  const PARTS = {
    emergent: ["", "noise of the network, carried to this input"],
    learned: ["learned", "more, as errors on held-out rows have shown"],
    "input errors": ["errors", "error bars of the inputs"],
    distance: ["distance", "distance from the training data"],
  };
  function variance(one) {
    const box = make("div", { class: "variance" });
    const total = Object.values(one.variance).reduce((sum, part) => sum + part, 0);
    const what = schema.task === "classification" ? `logit of ${one.name}` : one.name;
    box.append(make("h3", {}, `What the variance of ${schema.task === "classification" ? "the " : ""}${what} is made of`));
    if (!(total > 0)) { box.append(make("p", { class: "note" }, "There is none.")); return box; }
    const bar = make("div", { class: "parts", "aria-hidden": "true" }), list = make("ul", { class: "legend" });
    for (const [name, part] of Object.entries(one.variance)) {
      const [style, meaning] = PARTS[name];
      const slice = make("i", { class: style });
      slice.style.width = `${(100 * part) / total}%`;
      bar.append(slice);
      if (part >= 0.0005 * total) list.append(make("li", { "data-part": name }, make("i", { class: style }), make("b", {}, percent(part / total)), make("span", {}, meaning)));
    }
    box.append(bar, list);
    return box;
  }

  // The form of a table.
  const DAY = 864e5;
  function form() {
    const fields = schema.columns.map((column, i) => {
      const id = `column-${i}`;
      const kind = column.kind === "number" || column.kind === "date" ? slider : choice;
      return kind(column, id);
    });
    $("inputs").replaceChildren(make("h2", {}, "One row"), ...fields.map((field) => field.box));
    for (const kind of ["input", "change"]) $("inputs").addEventListener(kind, update);
    body = () => [Object.assign({}, ...fields.map((field) => field.value()))];
  }

  function choice(column, id) {
    const names = column.kind === "boolean" ? ["false", "true"] : column.categories;
    const select = make("select", { id }, ...names.map((name) => make("option", { value: name }, name)), make("option", { value: "", "data-missing": true }, "(missing)"));
    const box = make("div", { class: "field" }, make("div", { class: "head" }, make("label", { for: id }, column.name), select));
    const value = () => ({ [column.name]: select.selectedIndex < names.length ? names[select.selectedIndex] : null });
    return { box, value };
  }

  function slider(column, id) {
    const isDate = column.kind === "date";
    const span = column.high - column.low || 1;
    const step = column.whole || (isDate && !column.hours) ? 1 : isDate ? 1 / 24 : 10 ** Math.floor(Math.log10(span / 100));
    // A quarter more to both sides, to see what it says beyond what it has seen.
    let least = column.low - span / 4, most = column.high + span / 4;
    if (column.low >= 0 && !isDate) least = Math.max(0, least);
    least = Math.floor(least / step) * step; most = Math.ceil(most / step) * step;
    const start = Math.round(column.typical / step) * step;
    const text = (days) => new Date(Math.round(days * DAY)).toISOString().slice(0, column.hours ? 16 : 10);
    const shown = (value) => (isDate ? text(value) : String(Number(value.toPrecision(7))));
    const exact = make("input", isDate ? { type: column.hours ? "datetime-local" : "date", id } : { type: "number", step: "any", id });
    exact.value = shown(start);
    const range = make("input", { type: "range", min: least, max: most, step, "aria-label": `${column.name}, slider` });
    range.value = start;
    const label = () => range.setAttribute("aria-valuetext", shown(Number(range.value)));
    label();
    range.addEventListener("input", () => { exact.value = shown(Number(range.value)); label(); });
    exact.addEventListener("input", () => {
      const value = isDate ? Date.parse(`${exact.value}Z`) / DAY : exact.valueAsNumber;
      const days = isDate && !column.hours ? Date.parse(exact.value) / DAY : value;
      if (Number.isFinite(days)) { range.value = days; label(); }
    });
    const band = make("i");
    band.style.left = `${(100 * (column.low - least)) / (most - least)}%`;
    band.style.right = `${(100 * (most - column.high)) / (most - least)}%`;
    const box = make("div", { class: "field" },
      make("div", { class: "head" }, make("label", { for: id }, column.name), exact), range,
      make("div", { class: "seen", "aria-hidden": "true" }, band),
      make("p", { class: "note" }, isDate || column.whole ? `training: ${shown(column.low)} to ${shown(column.high)}` : `training: ${number(column.low, span / 10)} to ${number(column.high, span / 10)}`));
    const given = () => (exact.value === "" ? null : isDate ? exact.value : Number(exact.value));
    if (!column.error) return { box, value: () => ({ [column.name]: given() }) };
    const error = errorBar(column, id, span);
    box.append(error.box);
    return { box, value: () => ({ [column.name]: given(), [column.error]: error.value() }) };
  }

  function errorBar(column, id, span) {
    const unit = 10 ** Math.floor(Math.log10(column.std / 50));
    const exact = make("input", { type: "number", min: 0, step: "any", id: `${id}-error`, value: 0, placeholder: 0 });
    const range = make("input", { type: "range", min: 0, max: Number((2 * column.std).toPrecision(2)), step: unit, value: 0, "aria-label": `error bar of ${column.name}, slider` });
    range.addEventListener("input", () => { exact.value = String(Number(Number(range.value).toPrecision(7))); });
    exact.addEventListener("input", () => { range.value = exact.valueAsNumber || 0; });
    const box = make("div", { class: "error" }, make("label", { for: `${id}-error` }, `\u00b1 (${column.error})`), range, exact);
    return { box, value: () => Number(exact.value) }; // none is an exact value
  }

  // Drawing, or a picture.
  function drawing() {
    document.body.classList.add("drawn");
    const [channels, height, width] = schema.shape;
    const scale = Math.max(1, Math.ceil(280 / Math.max(width, height)));
    const big = make("canvas", { id: "canvas", width: width * scale, height: height * scale, role: "img", "aria-label": "Draw here with mouse or finger, or drop a picture; by keyboard, choose a picture below" });
    const small = make("canvas", { id: "given", width, height, role: "img", "aria-label": "What the network is given" });
    const ink = big.getContext("2d", { willReadFrequently: true }), out = small.getContext("2d", { willReadFrequently: true });
    const check = (id, text, on) => make("label", {}, make("input", { type: "checkbox", id, checked: on }), text);
    const file = make("input", { type: "file", id: "file", accept: "image/*", "aria-label": "Choose a picture" });
    const clear = make("button", { type: "button", class: "button", id: "clear" }, "Clear");
    const tools = make("div", { class: "tools" }, clear, make("label", {}, file, make("span", { class: "button" }, "Choose a picture")));
    if (channels === 1) tools.append(check("centre", "centre what is drawn", true));
    else tools.append(make("label", {}, make("input", { type: "color", id: "colour", value: "#ffffff" }), "colour"));
    tools.append(check("invert", "invert", false));
    $("inputs").replaceChildren(make("div", { class: "drawing" }, make("h2", {}, "Draw, or drop a picture"), big, tools,
      make("div", { class: "given" }, small, make("p", { class: "note" }, `What the network is given: ${width} \u00d7 ${height} pixels${channels === 1 ? ", grey" : ""}.`))));
    let isDrawn = false, picture = null, last = null;

    const empty = () => {
      ink.globalCompositeOperation = "source-over";
      for (const each of [ink, out]) { each.fillStyle = "#000"; each.fillRect(0, 0, big.width, big.height); }
      isDrawn = false; picture = null; file.value = "";
    };
    const place = (event) => {
      const box = big.getBoundingClientRect();
      return [((event.clientX - box.left) * big.width) / box.width, ((event.clientY - box.top) * big.height) / box.height];
    };
    const stroke = (event) => {
      const [x, y] = place(event);
      ink.strokeStyle = channels === 1 ? "#fff" : $("colour").value;
      ink.lineWidth = 0.075 * big.width;
      ink.lineCap = ink.lineJoin = "round";
      ink.beginPath();
      ink.moveTo(...(last || [x, y]));
      ink.lineTo(x, y);
      ink.stroke();
      last = [x, y]; isDrawn = true;
      update();
    };
    big.addEventListener("pointerdown", (event) => {
      if (picture) empty();
      big.setPointerCapture(event.pointerId);
      last = null;
      stroke(event);
    });
    big.addEventListener("pointermove", (event) => { if (event.buttons && last) stroke(event); });
    for (const end of ["pointerup", "pointercancel"]) big.addEventListener(end, () => { last = null; });
    clear.addEventListener("click", () => { empty(); update(); });
    tools.addEventListener("change", (event) => { if (event.target === file) take(file.files[0]); else update(); });
    big.addEventListener("dragover", (event) => { event.preventDefault(); big.classList.add("over"); });
    big.addEventListener("dragleave", () => big.classList.remove("over"));
    big.addEventListener("drop", (event) => { event.preventDefault(); big.classList.remove("over"); take(event.dataTransfer.files[0]); });

    async function take(chosen) {
      if (!chosen) return;
      try {
        const found = await createImageBitmap(chosen);
        empty();
        picture = found;
        fill(ink, big);
        update();
      } catch { say(`${chosen.name} is no picture that this browser can read.`); }
    }
    // All of the frame, cut at two sides if the picture has another shape.
    function fill(context, canvas) {
      const factor = Math.max(canvas.width / picture.width, canvas.height / picture.height);
      const [w, h] = [factor * picture.width, factor * picture.height];
      context.imageSmoothingQuality = "high";
      context.drawImage(picture, (canvas.width - w) / 2, (canvas.height - h) / 2, w, h);
    }
    // As the digits of MNIST are made: 20 of 28 pixels large, the centre of mass in the middle.
    function centred() {
      const data = ink.getImageData(0, 0, big.width, big.height).data;
      let [left, top, right, bottom, mass, mx, my] = [big.width, big.height, -1, -1, 0, 0, 0];
      for (let y = 0, i = 0; y < big.height; y++) {
        for (let x = 0; x < big.width; x++, i += 4) {
          const value = data[i];
          if (value < 16) continue;
          left = Math.min(left, x); right = Math.max(right, x); top = Math.min(top, y); bottom = Math.max(bottom, y);
          mass += value; mx += x * value; my += y * value;
        }
      }
      if (!mass) return;
      const [w, h] = [right - left + 1, bottom - top + 1];
      const factor = (20 / 28) * Math.min(width / w, height / h);
      const x = width / 2 - factor * (mx / mass + 0.5 - left), y = height / 2 - factor * (my / mass + 0.5 - top);
      out.drawImage(big, left, top, w, h, x, y, factor * w, factor * h);
    }
    body = () => {
      out.fillStyle = "#000";
      out.fillRect(0, 0, width, height);
      if (!isDrawn && !picture) return null;
      out.imageSmoothingQuality = "high";
      if (picture) fill(out, small);
      else if (channels === 1 && $("centre").checked) centred();
      else out.drawImage(big, 0, 0, width, height);
      const image = out.getImageData(0, 0, width, height), data = image.data;
      if ($("invert").checked) {
        for (let i = 0; i < data.length; i++) if (i % 4 !== 3) data[i] = 255 - data[i];
        out.putImageData(image, 0, 0);
      }
      const pixel = (i) => (channels === 1 ? Math.round(0.299 * data[i] + 0.587 * data[i + 1] + 0.114 * data[i + 2]) : [data[i], data[i + 1], data[i + 2]]);
      return Array.from({ length: height }, (_, y) => Array.from({ length: width }, (_, x) => pixel(4 * (y * width + x))));
    };
    empty();
  }

  // Beginning: with a token, if the server wants one.
  function lock() { $("board").hidden = true; $("unlock").hidden = false; }
  $("unlock").addEventListener("submit", (event) => {
    event.preventDefault();
    stored(() => sessionStorage, "covary-token", $("token").value);
    $("token").value = "";
    begin();
  });

  async function begin() {
    try {
      schema = await ask("schema");
    } catch (error) {
      if (!("status" in error)) throw error;
      if (error.status === 401) { say(stored(() => sessionStorage, "covary-token") ? "This is not the token of this server." : ""); return lock(); }
      say(error.sentence);
      setTimeout(begin, 1500);
      return;
    }
    say("");
    $("unlock").hidden = true;
    const what = schema.kind === "images" ? "What is in the picture?" : schema.targets.map((target) => target.name).join(", ");
    document.title = `${schema.run}: ${what}`;
    $("title").textContent = schema.kind === "images" ? what : `Predict ${what}`;
    $("about").replaceChildren(make("p", {}, `The flag: ${schema.promise}`),
      make("p", {}, `Run ${schema.run}, model `, make("code", {}, schema.model.slice(0, 12)), ". ", make("a", { href: "docs" }, "The interface"), " for programs."));
    $("about").hidden = $("board").hidden = false;
    if (schema.kind === "images" && ![1, 3].includes(schema.shape[0])) { say("Images of this run are neither grey nor of three colours: send them to /predict."); return; }
    if (schema.kind === "table") form(); else drawing();
    update();
  }
  begin();
})();
