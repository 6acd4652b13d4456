// Measures the documents of this window's frames once all of them are loaded, and writes what it found as JSON.
"use strict";
const ROOM = 1.5; // pixels that boxes may reach into each other: a font's box is higher than its letters

function visiblePart(box, element) {
  // What the scrolled and clipped elements around it show of a box.
  let { left, right, top, bottom } = box;
  for (let outer = element; outer && outer.tagName !== "BODY" && outer.tagName !== "HTML"; outer = outer.parentElement) {
    const style = outer.ownerDocument.defaultView.getComputedStyle(outer);
    if (style.overflowX === "visible" || outer.tagName === "svg" || style.display === "inline") continue;
    const clip = outer.getBoundingClientRect();
    left = Math.max(left, clip.left); right = Math.min(right, clip.right);
    top = Math.max(top, clip.top); bottom = Math.min(bottom, clip.bottom);
  }
  return { left, right, top, bottom };
}

function textsOf(page) {
  const found = [];
  const nodes = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (nodes.nextNode()) {
    const node = nodes.currentNode, element = node.parentElement, text = node.textContent.trim();
    if (!text || !element.closest(ROOT) || element.closest("script, style, option")) continue;
    if (!element.checkVisibility({ contentVisibilityAuto: true, opacityProperty: true, visibilityProperty: true })) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      const seen = visiblePart(box, element);
      if (seen.right - seen.left > 1 && seen.bottom - seen.top > 1) found.push({ node, element, text: text.slice(0, 40).trim(), whole: box, ...seen });
    }
  }
  return found;
}

function faultsOf(page, texts, width) {
  const faults = [];
  if (page.documentElement.scrollWidth > width + 1) faults.push(`the page is ${page.documentElement.scrollWidth} pixels wide`);
  for (const one of texts) {
    if (one.left < -1 || one.right > width + 1 || one.top < -1) faults.push(`"${one.text}" leaves the page`);
    const drawing = one.element.closest("svg")?.getBoundingClientRect();
    if (drawing && (one.whole.left < drawing.left - ROOM || one.whole.right > drawing.right + ROOM
      || one.whole.top < drawing.top - ROOM || one.whole.bottom > drawing.bottom + ROOM)) faults.push(`"${one.text}" leaves its drawing`);
  }
  const sorted = [...texts].sort((a, b) => a.top - b.top);
  for (let i = 0; i < sorted.length; i++) {
    for (let j = i + 1; j < sorted.length && sorted[j].top < sorted[i].bottom - ROOM; j++) {
      const [a, b] = [sorted[i], sorted[j]];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left), up = Math.min(a.bottom, b.bottom) - b.top;
      if (a.node !== b.node && across > ROOM && up > ROOM) faults.push(`"${a.text}" and "${b.text}" cover each other`);
    }
  }
  return faults;
}

addEventListener("error", (event) => { document.getElementById("found").textContent = `${event.message}, line ${event.lineno}`; });
addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map((frame) => {
    const page = frame.contentDocument, width = frame.contentWindow.innerWidth, texts = textsOf(page);
    return { width, texts: texts.length, faults: faultsOf(page, texts, width) };
  });
  document.getElementById("found").textContent = JSON.stringify(found);
});
