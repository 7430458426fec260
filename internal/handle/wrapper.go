package handle

import (
	"errors"
	"fmt"
	"sync/atomic"
)

// Wrapper is a wrapper of drivers between database/sql and connections of a handle. At first nobody knows
// whether the wrapper passes driver.Validator on: database/sql calls Valid for the first time when the first
// use of a connection is over.
type Wrapper struct {
	name  string      // the import path of its package
	tells atomic.Bool // the wrapper passes driver.Validator on
	hides atomic.Bool // the wrapper does not
}

// Wrapper returns the wrapper of that name; nil for "", which is none.
func (h *Handle) Wrapper(name string) *Wrapper {
	if name == "" {
		return nil
	}
	w, _ := h.wrappers.LoadOrStore(name, &Wrapper{name: name})
	return w.(*Wrapper)
}

// Tells notes that database/sql has called Valid through the wrapper.
func (w *Wrapper) Tells() {
	if !w.tells.Load() {
		w.tells.Store(true)
	}
}

// Told reports whether database/sql is known to tell the end of each use of a connection. w may be nil: without
// a wrapper it does.
func (w *Wrapper) Told() bool { return w == nil || w.tells.Load() }

// Hides notes that the use of a connection has ended without a call of Valid.
func (w *Wrapper) Hides() { w.hides.Store(true) }

// Unusable returns why connections of a handle with a budget cannot be used through the wrapper; nil unless the
// wrapper is known to hide driver.Validator.
func (w *Wrapper) Unusable() error {
	if !w.hides.Load() {
		return nil
	}
	return w.Refuses()
}

// Refuses returns the error of a statement that comes through a wrapper which does not pass driver.Validator
// on.
func (w *Wrapper) Refuses() error {
	return fmt.Errorf("mysqllock: with maxConns a connection goes back when database/sql calls driver.Validator,"+
		" which %s, a wrapper of drivers, hides;"+
		" put it beneath this driver, with Config.Base, use one that passes driver.Validator on, or leave maxConns out: %w",
		w.name, errors.ErrUnsupported)
}
