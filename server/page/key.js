import { $ } from "/page/dom.js";

/** The reader has no key, or keeps it to himself. */
export class NoKey extends Error {
  name = "NoKey";

  constructor() {
    super("This server asks for an API key.");
  }
}

/**
 * Ask for an API key. It is returned and kept nowhere else: not in storage, not in the address.
 *
 * @param {boolean} wrong whether one was given that the server does not know
 * @returns {Promise<string>} rejects if the reader has none
 */
export function askForKey(wrong) {
  const dialog = $("key-dialog");
  const input = $("key-input");
  $("key-wrong").hidden = !wrong;
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.addEventListener(
      "close",
      () => {
        const key = input.value.trim();
        input.value = "";
        if (dialog.returnValue === "ok" && key) resolve(key);
        else reject(new NoKey());
      },
      { once: true },
    );
  });
}
