// Creates and finds elements of the page. All text is set as text, never as HTML.
const SVG = "http://www.w3.org/2000/svg";
const BASE = location.pathname.replace(/\/+$/, "");
const $ = (id) => document.getElementById(id);

const node = (tag, fields = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
};

const shape = (tag, attributes = {}, ...children) => {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

const number = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

// User-perceived characters: accents and joined emoji stay whole.
const segmenter = Intl.Segmenter && new Intl.Segmenter();
const characters = (text) => (segmenter ? Array.from(segmenter.segment(text), ({ segment }) => segment) : [...text]);

const tell = (text) => { $("status").textContent = text; };
