// Run within a copy of a report: posts to the page around it what a reader would see go wrong.
addEventListener("load", () => setTimeout(() => {
  const wrong = [];
  const wide = innerWidth;
  const said = (node) => (node.textContent || node.tagName).trim().slice(0, 40);
  if (document.documentElement.scrollWidth > wide) {
    wrong.push(`the page is ${document.documentElement.scrollWidth} wide`);
  }
  const shown = [...document.querySelectorAll("body *")].filter((node) => node.getClientRects().length);
  for (const node of shown.filter((node) => !node.closest("thead") || wide > 680)) {
    const box = node.getBoundingClientRect();
    if (box.width && (box.left < -0.5 || box.right > wide + 0.5)) wrong.push(`beyond the edge: ${said(node)}`);
  }
  for (const node of shown.filter((node) => !node.closest("svg"))) {
    const around = node.closest("section, .tile, header, footer");
    const box = node.getBoundingClientRect();
    if (around && box.right > around.getBoundingClientRect().right + 0.5) wrong.push(`out of its box: ${said(node)}`);
    if (getComputedStyle(node).overflowX === "hidden" && node.scrollWidth > node.clientWidth && !node.closest("thead")) {
      wrong.push(`cut: ${said(node)}`);
    }
  }
  for (const picture of document.querySelectorAll("svg.pic")) {
    const texts = [...picture.querySelectorAll("text")].map((node) => [node, node.getBoundingClientRect()]);
    const end = picture.getBoundingClientRect();
    for (const [node, box] of texts) {
      if (box.bottom > end.bottom + 1 || box.top < end.top - 8) wrong.push(`above or below its picture: ${said(node)}`);
    }
    texts.forEach(([one, a], place) => texts.slice(place + 1).forEach(([other, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 0.5 && down > 2.5) wrong.push(`${said(one)} lies on ${said(other)}`);
    }));
  }
  // Contrast of text with what it stands on, as WCAG 2.1 reckons it
  const rgb = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const of = (one) => (one / 255 <= 0.03928 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * of(r) + 0.7152 * of(g) + 0.0722 * of(b);
  };
  const ground = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const colour = rgb(getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const pale = new Set();
  for (const node of shown) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || node.closest("title, desc, style") || node.classList.contains("on") || node.classList.contains("dark")) {
      continue;
    }
    const style = getComputedStyle(node);
    const pair = [light(rgb(node.closest("svg") ? style.fill : style.color)), light(ground(node))].sort((a, b) => b - a);
    if ((pair[0] + 0.05) / (pair[1] + 0.05) < 4.5) pale.add(`hard to read: ${said(node)}`);
  }
  parent.postMessage({
    name: NAME,
    width: wide,
    wrong: [...wrong, ...pale].slice(0, 20),
    fetched: [...document.querySelectorAll("[src], [href], [srcset], [poster], [data], [action]")].map(said).concat(
      [...document.querySelectorAll("style, [style]")].flatMap((node) =>
        `${node.tagName === "STYLE" ? node.textContent : node.getAttribute("style")}`.match(
          /url\((?!#)[^)]*|@import.*|@font-face/g) || [])),
    runs: [...document.querySelectorAll("script:not([data-audit]), iframe, img, object, embed, link")].map(said),
    title: document.title,
    ground: rgb(getComputedStyle(document.body).backgroundColor),
    pictures: document.querySelectorAll("figure svg.pic").length,
    tables: document.querySelectorAll("table").length,
  }, "*");
}, 0));
