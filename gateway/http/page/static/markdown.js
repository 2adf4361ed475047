// Answers as Markdown: parsed by marked, sanitized by DOMPurify before anything reaches the document.

import { marked } from "./marked.esm.js";
import "./purify.min.js";

const { DOMPurify } = globalThis;
const ALLOWED_TAGS = [
  ..."a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre strong table tbody td th thead tr ul".split(" "),
];
const ALLOWED_ATTR = ["align", "href", "start"];

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };

// HTML in an answer is shown as it is written.
marked.use({ renderer: { html: ({ text }) => text.replace(/[&<>]/g, (sign) => ESCAPES[sign]) } });
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

/** @returns {DocumentFragment} what Markdown text looks like; no images, no HTML of its own */
export function rendered(text) {
  const html = marked.parse(text, { async: false, breaks: true, gfm: true }).trim();
  return DOMPurify.sanitize(html, {
    ALLOWED_TAGS,
    ALLOWED_ATTR,
    ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
    RETURN_DOM_FRAGMENT: true,
  });
}
