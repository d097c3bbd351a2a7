// Small helpers for elements. Text only ever enters the page as text nodes.

/**
 * Return the element with an id.
 * @param {string} id
 * @returns {any}
 */
export function get(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`index.html lacks #${id}`);
  return found;
}

/**
 * Create an element.
 * @param {string} tag
 * @param {Record<string, string | number | boolean>} attributes
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) made.setAttribute(name, "");
    else if (value !== false) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}

/** Change an element's text, if it differs: an equal write would still cost a layout. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Change an element's attribute, if it differs. */
export function mark(element, name, value) {
  if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/**
 * Show a list of items, and reuse the elements of those that are still there.
 * @template T
 * @param {HTMLElement} list
 * @param {T[]} items
 * @param {(item: T) => string} key unique text of an item; an element is made anew when it changes
 * @param {(item: T) => HTMLElement} build
 * @param {(element: any, item: T) => void} [update] called with every item, new or not
 */
export function fill(list, items, key, build, update) {
  const old = new Map([...list.children].map((child) => [child.itemKey, child]));
  let next = list.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let element = old.get(name);
    if (element) {
      old.delete(name);
    } else {
      element = build(item);
      element.itemKey = name;
    }
    if (element === next) next = next.nextElementSibling;
    else list.insertBefore(element, next);
    update?.(element, item);
  }
  for (const element of old.values()) {
    const hadFocus = element.contains(document.activeElement);
    element.remove();
    // Not the next item, which keys pressed for this one would change.
    if (hadFocus) {
      list.tabIndex = Math.max(list.tabIndex, -1);
      list.focus();
    }
  }
}

/** Let a click on one of several buttons release the others; `choose` is called with its place. */
export function press(buttons, choose) {
  buttons.forEach((button, place) =>
    button.addEventListener("click", () => {
      for (const one of buttons) mark(one, "aria-pressed", one === button);
      choose(place);
    }),
  );
}

/** Return the address of a device's view. */
export function deviceHref(id) {
  return `#device=${encodeURIComponent(wellFormed(id))}`;
}

/** Replace lone surrogates, which cannot be encoded. */
export function wellFormed(text) {
  return text.replace(/[\ud800-\udfff]/gu, "\ufffd");
}

/** Return a link to a device's view. */
export function deviceLink(id, shown) {
  return make("a", { href: deviceHref(id), class: "name" }, shown);
}
