export function useState<T>(start: T | (() => T)): [T, (value: T | ((old: T) => T)) => void];
export function useRef<T>(start: T): { current: T };
export function useMemo<T>(make: () => T, of: any[]): T;
export function useCallback<T>(what: T, of: any[]): T;
export function useContext(context: any): any;
export function useEffect(what: () => any, of?: any[]): void;
export function useLayoutEffect(what: () => any, of?: any[]): void;
export function useErrorBoundary(): [any, () => void];
