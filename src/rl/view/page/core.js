// Used by every part of the page: Preact and its templates.

import { h, render, createContext } from "./vendor/preact.mjs";
import { useCallback, useContext, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);
export { createContext, render, useCallback, useContext, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState };
