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
  cancel.hidden = !mayCancel;
  field.value = "";
  write(get("token-words"), short(words, 600));
  dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    const end = (token) => {
      dialog.onclose = null;
      dialog.close();
      field.value = "";
      resolve(token);
    };
    // Browsers close a dialog when Escape is pressed a second time, whatever a page says.
    dialog.onclose = () => {
      if (!dialog.open) mayCancel ? end("") : dialog.showModal();
    };
    dialog.onsubmit = (event) => {
      event.preventDefault();
      if (field.value.trim()) end(field.value.trim());
    };
    cancel.onclick = () => end("");
  });
}
