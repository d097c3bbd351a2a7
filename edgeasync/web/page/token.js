// The form that asks for an access token.

import { get, write } from "./dom.js";
import { short } from "./text.js";

/**
 * Ask for a token, with the hub's words about why it needs one.
 * @param {string} words
 * @param {boolean} mayCancel without a token for reading, there is nothing to return to
 * @returns {Promise<string>} the token; empty: cancelled
 */
export function askToken(words, mayCancel) {
  const dialog = get("token"),
    field = get("token-field"),
    cancel = get("token-cancel");
  const form = dialog.querySelector("form");
  cancel.hidden = !mayCancel;
  field.value = "";
  write(get("token-words"), short(words, 600));
  if (!dialog.open) dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    const listening = new AbortController();
    const end = (token) => {
      listening.abort();
      dialog.close();
      field.value = "";
      resolve(token);
    };
    form.addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        if (field.value.trim()) end(field.value.trim());
      },
      { signal: listening.signal },
    );
    cancel.addEventListener("click", () => end(""), { signal: listening.signal });
    dialog.addEventListener(
      "cancel",
      (event) => {
        event.preventDefault();
        if (mayCancel) end("");
      },
      { signal: listening.signal },
    );
  });
}
