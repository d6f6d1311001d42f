// Returns what is wrong with the page for people who use keyboards, screen readers or need contrast.
() => {
  const wrong = [];
  const name = (node) => `${node.tagName.toLowerCase()}${node.id ? `#${node.id}` : ""}.${node.className?.baseVal ?? node.className}`;
  const seen = (node) => node.checkVisibility({ opacityProperty: false, visibilityProperty: true }) && !node.closest("[inert], [aria-hidden=true]");
  const all = (selector) => [...document.querySelectorAll(selector)].filter(seen);

  // Everything that can be used has a name.
  const named = (node) =>
    node.getAttribute("aria-label")?.trim() ||
    (node.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "").join("").trim() ||
    [...(node.labels ?? [])].map((label) => label.textContent).join("").trim() ||
    (node.matches("button, a, summary, [role=tab]") && node.textContent.trim());
  for (const node of all("button, a[href], input, select, textarea, summary, [role=tab], [role=tabpanel], [role=region], dialog, meter")) {
    if (!named(node)) wrong.push(`${name(node)} has no name`);
  }
  for (const picture of all("img")) if (!picture.hasAttribute("alt")) wrong.push(`${name(picture)} has no alt`);

  // Ids are unique, and references to them hold.
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) wrong.push(`id ${id} is there twice`);
  for (const attribute of ["aria-controls", "aria-labelledby", "aria-describedby", "for"]) {
    for (const node of document.querySelectorAll(`[${attribute}]`)) {
      for (const id of node.getAttribute(attribute).split(" ")) {
        if (!document.getElementById(id)) wrong.push(`${name(node)} names ${id}, which is not there`);
      }
    }
  }

  // Landmarks, one first heading, a language, no positive tabindex, nothing that nests controls.
  for (const landmark of ["main", "nav", "header"]) {
    if (document.querySelectorAll(landmark).length !== 1) wrong.push(`there is not one ${landmark}`);
  }
  if (document.querySelectorAll("h1").length !== 1) wrong.push("there is not one h1");
  if (!document.documentElement.lang) wrong.push("the page has no language");
  for (const node of document.querySelectorAll("[tabindex]")) if (node.tabIndex > 0) wrong.push(`${name(node)} changes the order of focus`);
  for (const node of document.querySelectorAll("button button, a button, button a, summary button, summary a")) wrong.push(`${name(node)} is a control in a control`);
  for (const list of document.querySelectorAll("ul, ol")) {
    for (const child of list.children) if (child.tagName !== "LI") wrong.push(`${name(list)} holds ${name(child)}`);
  }
  const tabs = all("[role=tab]");
  if (tabs.length && tabs.filter((tab) => tab.getAttribute("aria-selected") === "true").length !== 1) wrong.push("not one tab is selected");

  // Targets are large enough for fingers and unsteady hands (WCAG 2.2, 24 pixels).
  for (const node of all("button, select, summary")) {
    const box = node.getBoundingClientRect();
    if (box.width < 24 || box.height < 24) wrong.push(`${name(node)} is only ${Math.round(box.width)} x ${Math.round(box.height)}`);
  }

  // Contrast (WCAG 2, AA): 4.5, or 3 for large text.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = "#000";
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((part, index) => part * top[3] + below[index] * (1 - top[3]));
  const background = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.unshift(rgba(getComputedStyle(at).backgroundColor));
    return layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.map((part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || !seen(node) || node.closest(".visually-hidden, :disabled, .skip, option, noscript")) continue;
    const style = getComputedStyle(node);
    const below = background(node);
    const colour = over(rgba(style.color), below);
    const [light, dark] = [luminance(colour), luminance(below)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) wrong.push(`${name(node)} "${text.data.trim().slice(0, 20)}" has a contrast of ${ratio.toFixed(2)}`);
  }
  return wrong;
};
