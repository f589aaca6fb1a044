"""Contrast of the page's texts, by the Web Content Accessibility Guidelines."""

READABLE = 4.5
_CONTRASTS = """() => {
  const parse = (colour) => {
    const [red, green, blue, alpha = 1] = colour.match(/[\\d.]+/g).map(Number);
    return { rgb: [red, green, blue], alpha };
  };
  const linear = (part) => (part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
  const light = (rgb) => rgb.reduce((sum, part, index) => sum + linear(part / 255) * [.2126, .7152, .0722][index], 0);
  const over = ({ rgb, alpha }, ground, opacity) =>
    rgb.map((part, index) => part * alpha * opacity + ground[index] * (1 - alpha * opacity));
  const boxOf = (element) => (element.tagName === "g"
    ? getComputedStyle(element.querySelector("rect")).fill : getComputedStyle(element).backgroundColor);
  const groundOf = (element) => {
    while (element && parse(boxOf(element)).alpha < 1) element = element.parentElement;
    return element ? parse(boxOf(element)).rgb : [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")].flatMap((element) => {
    const own = [...element.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    const part = element.placeholder ? "::placeholder" : null;
    const unseen = !element.checkVisibility() || element.closest(".unseen, title, noscript, option, script");
    if (unseen || !(own || part)) return [];
    const style = getComputedStyle(element, part), ground = groundOf(element);
    const colour = parse(element.tagName === "text" ? style.fill : style.color);
    const lights = [light(over(colour, ground, Number(style.opacity))), light(ground)].sort((a, b) => b - a);
    return [[(lights[0] + .05) / (lights[1] + .05), element.textContent || element.placeholder]];
  });
}"""


def unreadable(page):
    """[contrast, text] of each text in the page whose contrast is below `READABLE`; there is some text."""
    contrasts = page.value(f"({_CONTRASTS})()")
    assert len(contrasts) > 20
    return [entry for entry in contrasts if entry[0] < READABLE]
