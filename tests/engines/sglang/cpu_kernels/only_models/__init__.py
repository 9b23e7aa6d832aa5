"""The models that tests run: importing all of SGLang's own makes a start twice as long."""
