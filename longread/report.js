/* Switches the heat of an HTML report between layers, KV heads and answer tokens.
   The page is whole without it: text, first heat and links stand in the HTML. */
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("heat").textContent);
  const passages = document.querySelectorAll(".text span");
  const painted = Uint8Array.from(passages, (span) => Number(span.className.slice(1)));
  const words = document.querySelectorAll(".answer b");
  const [layer, head, token] = ["layer", "head", "token"].map((id) => document.getElementById(id));
  const map = document.getElementById("map");
  const said = document.getElementById("said");
  let bytes = new Uint8Array(passages.length);
  let isChoice = false;

  // Where each passage stands in the whole text, from 0 to 1, for the map.
  const ends = new Float64Array(passages.length);
  let numChars = 0;
  passages.forEach((span, i) => (ends[i] = numChars += span.textContent.length));

  const decode = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const percent = (share) => (100 * share).toFixed(share < 0.1 ? 1 : 0) + "%";

  function slice() {
    const kind = isChoice ? data.choice : data.attention;
    if (token.valueAsNumber > 0) return [kind.tokens, token.valueAsNumber - 1];
    return [kind.heads, Number(layer.value) * head.length + Number(head.value)];
  }

  function paint() {
    const [slices, at] = slice();
    bytes = decode(slices.bytes[at]);
    for (let i = 0; i < bytes.length; i++) {
      const level = bytes[i] >> 4;
      if (level !== painted[i]) {
        painted[i] = level;
        passages[i].className = "h" + level;
      }
    }
    document.body.classList.toggle("choice", isChoice);
    words.forEach((word) => word.classList.toggle("now", Number(word.dataset.t) === token.valueAsNumber));
    const whole = token.valueAsNumber === 0;
    const what = whole ? "Whole answer" : `Token ${token.value} of ${token.max}`;
    const where = whole && (layer.value !== "0" || head.value !== "0")
      ? [layer, head].filter((list) => list.value !== "0")
          .map((list) => `${list.dataset.name} ${list.value - 1}`).join(", ")
      : "all layers and KV heads";
    said.textContent = `${what}, ${where}. ` + (isChoice
      ? `The strongest passage had ${percent(slices.peaks[at])} of its rows read.`
      : `The strongest passage drew ${percent(slices.peaks[at])} of this attention on the text.`);
    draw();
  }

  function draw() {
    const ratio = window.devicePixelRatio || 1;
    const height = Math.round(map.clientHeight * ratio);
    if (!height || !numChars) return;
    map.width = Math.round(map.clientWidth * ratio);
    map.height = height;
    const hottest = new Uint8Array(height);
    let row = 0;
    for (let i = 0; i < bytes.length; i++) {
      const end = Math.min(height - 1, Math.floor((height * ends[i]) / numChars));
      for (; row < end; row++) hottest[row] = Math.max(hottest[row], bytes[i]);
      hottest[row] = Math.max(hottest[row], bytes[i]);
    }
    const style = getComputedStyle(document.body);
    const pen = map.getContext("2d");
    const colour = style.getPropertyValue("--heat");
    const strongest = Number(style.getPropertyValue("--strongest"));
    for (let y = 0; y < height; y++) {
      if (hottest[y] < 16) continue;
      pen.fillStyle = `rgb(${colour} / ${(hottest[y] / 255) * strongest})`;
      pen.fillRect(0, y, map.width, 1);
    }
    pen.fillStyle = style.getPropertyValue("--accent");
    for (const mark of document.querySelectorAll(".text sup")) {
      const y = (height * (ends[mark.dataset.p] || 0)) / numChars;
      pen.fillRect(map.width * 0.55, y - 1.5 * ratio, map.width, 3 * ratio);
    }
  }

  for (const list of [layer, head]) {
    list.addEventListener("change", () => {
      token.value = 0;
      paint();
    });
  }
  function pick(number) {
    token.value = number;
    layer.value = head.value = 0;
    paint();
  }
  token.addEventListener("input", () => pick(token.value));
  words.forEach((word) => word.addEventListener("click", () => {
    pick(Number(word.dataset.t) === token.valueAsNumber ? 0 : word.dataset.t);
  }));
  for (const input of document.querySelectorAll("input[name=view]")) {
    input.addEventListener("change", () => {
      isChoice = input.value === "choice" && input.checked;
      paint();
    });
  }
  map.addEventListener("click", (event) => {
    const at = (numChars * event.offsetY) / map.clientHeight;
    const found = ends.findIndex((end) => end >= at);
    if (found >= 0) passages[found].scrollIntoView({ block: "center" });
  });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.getElementById("controls").hidden = false;
  document.querySelector("input[name=view]").checked = true;
  layer.value = head.value = token.value = 0; // a reload keeps what was picked, and the page does not
  paint();
})();
