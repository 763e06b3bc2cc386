/**
 * Elements made in code.
 *
 * Strings become text nodes and nothing is ever parsed as markup, so whatever a model writes stays text.
 * Styles are classes and attributes: the page's Content-Security-Policy allows no inline style.
 */

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element with attributes (null ones are left out) and children (null ones are left out). */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
