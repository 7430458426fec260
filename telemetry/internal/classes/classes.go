// Package classes bounds the classes of keys that telemetry has as labels.
package classes

import (
	"slices"
	"sync"
)

const (
	most  = 100 // how many classes there are, beside other
	other = "other"
)

// Classes says to which classes keys belong. A nil one knows none. It is safe for
// concurrent use.
type Classes struct {
	of func(key string) string

	mu    sync.Mutex
	known map[string]bool
}

// New returns the Classes of a function, nil of nil. Keys without a class, and those of
// classes for which there is no room, are of "other".
func New(of func(key string) string) *Classes {
	if of == nil {
		return nil
	}
	return &Classes{of: of, known: make(map[string]bool)}
}

// Of returns the classes of keys, each once.
func (c *Classes) Of(keys []string) (classes []string) {
	if c == nil {
		return nil
	}
	for _, key := range keys {
		if class := c.bounded(c.of(key)); !slices.Contains(classes, class) {
			classes = append(classes, class)
		}
	}
	return classes
}

func (c *Classes) bounded(class string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case class == "" || !c.known[class] && len(c.known) >= most:
		return other
	case !c.known[class]:
		c.known[class] = true
	}
	return class
}
